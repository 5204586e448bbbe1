"""Where tiles of queries start, by the kernel and by a rule that looks at one row at a time."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from support.segments import CUT, begins, ids_of, tile_starts
from support.turns import in_turns, some
from support.variants import rendered_module

BLOCK_M = 16

#: Segments of 20 rows and more start tiles.
LENGTHS = (1, 2, 7, 15, 16, 17, 19, 20, 26, 32, 33, 38, 47, 48, 54, 100)


@functools.cache
def _module() -> ModuleType:
    return rendered_module(CUT["causal"], hopper=True)


def _cut(
    ids: torch.Tensor,
    batch: int,
    chunk: int,
    block_m: int,
    module: ModuleType | None = None,
    *,
    finds_segments: bool = True,
) -> tuple[torch.Tensor, ...]:
    """What the kernel makes of ids; without its last programs what those of entries do."""
    length = ids.shape[-1]
    entries, most = ids.numel() // length, 3 * -(-length // block_m)
    cuts, begin = torch.full((batch * most + 2,), -7, dtype=torch.int32), torch.full_like(ids, -7)
    lists, counter = torch.full((entries * (most + 1),), -7, dtype=torch.int32), ids.new_zeros(1)
    steps, programs = length.bit_length(), entries + -(-ids.numel() // chunk) * finds_segments
    unordered = torch.full((*ids.shape[:-1], 1), -7, dtype=torch.int32)
    args = (cuts, begin, unordered, ids, lists, counter, batch, length, ids.numel(), steps)
    (module or _module())._cut_queries[(programs,)](*args, block_m, chunk, True, 12345, True)
    assert counter.item() == 0
    return begin, unordered, cuts


def _check(ids: torch.Tensor, batch: int, chunk: int = 32, block_m: int = BLOCK_M) -> None:
    begin, unordered, cuts = _cut(ids, batch, chunk, block_m)
    assert not unordered.any()
    rows, length = ids.expand(batch, -1).tolist(), ids.shape[-1]
    starts = [b * length + row for b in range(batch) for row in tile_starts(rows[b], block_m)]
    assert begin.view(-1, length).tolist() == [begins(row) for row in ids.view(-1, length).tolist()]
    assert cuts[: len(starts) + 2].tolist() == [len(starts), *starts, batch * length]
    ends = [*starts[1:], batch * length]
    assert all(0 < end - start <= block_m for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize(
    ("length", "batch"), in_turns([1, 2, 15, 16, 17, 31, 48, 100, 333], [1, 2, 5], every=3)
)
def test_segments_of_many_lengths(batch: int, length: int) -> None:
    for seed in range(2):
        _check(ids_of(LENGTHS, batch, length, seed), batch, chunk=(8, 64)[seed])


@pytest.mark.parametrize("segment", LENGTHS)
def test_segments_of_one_length(segment: int) -> None:
    _check(ids_of([segment], 2, 150), 2)


@pytest.mark.parametrize("block_m", some([192, 48, 64, 128], every=2))
def test_other_tiles(block_m: int) -> None:
    """Those of three consumers are of no power of two; a first tile takes 64 rows of the second."""
    lengths = [5, block_m + 1, 3 * block_m // 2, 2 * block_m, 5 * block_m + 3, 6 * block_m - 9]
    _check(ids_of(lengths, 3, 12 * block_m), 3, chunk=32, block_m=block_m)


def test_ids_of_all_batch_entries_alike() -> None:
    _check(ids_of(LENGTHS, 1, 100, 3)[0], batch=3)


def test_the_least_and_the_greatest_id() -> None:
    ids = ids_of(LENGTHS, 1, 200, 2)
    ids[0, :30], ids[0, -30:] = -(2**31), 2**31 - 1
    _check(ids, 1)


def test_as_many_tiles_as_there_can_be() -> None:
    """In one block rows of a segment with tiles of its own, short ones, and another such one."""
    lengths = [26, 3, 27] * 3
    ids = torch.repeat_interleave(torch.arange(9, dtype=torch.int32), torch.tensor(lengths))
    _check(ids[None], 1)


def test_ids_out_of_order() -> None:
    """An entry of such ids has the tiles of one segment, and the others have theirs."""
    ids = ids_of([26, 3, 27], 3, 100)
    ids[1, 99] = ids[1, 0]
    _, unordered, cuts = _cut(ids, 3, 32, BLOCK_M)
    assert unordered.view(-1).tolist() == [0, 1, 0]
    starts = [row for b in (0, 2) for row in tile_starts(ids[b].tolist(), BLOCK_M)]
    several = starts.index(0, 1)
    first, last = starts[:several], [200 + row for row in starts[several:]]
    between = [100 + row for row in tile_starts([0] * 100, BLOCK_M)]
    expected = [*first, *between, *last]
    assert cuts[: len(expected) + 2].tolist() == [len(expected), *expected, 300]


def _looks(module: ModuleType | None = None) -> tuple[list[int], int]:
    """Which of four long entries are out of order, and the first tile, by the programs of entries.

    All of them are looked at in pieces of 128 positions. The second begins with another id than the
    first, and ends with padding. Of the third ids fall where a piece ends, of the fourth at its own
    end.
    """
    length = 2312
    ids = (torch.arange(length) // 600).int().expand(4, -1).clone()
    ids[1] += 1
    ids[1, -1] = ids[3, -1] = 0
    ids[2, 255] = 5
    assert 255 % 128 == 127
    _, unordered, cuts = _cut(ids, 4, 8, 192, module, finds_segments=False)
    return unordered.view(-1).tolist(), int(cuts[1])


def test_long_ids_out_of_order() -> None:
    assert _looks() == ([0, 0, 1, 1], 0)


#: What is wrong with how the kernel looks at them, and what it finds then.
SLIPS = {
    "within_pieces": (
        "falls |= following < _rank(tl.load(entry_ptr + position), least)",
        "falls |= (position % SPAN < SPAN - 1)"
        " & (following < _rank(tl.load(entry_ptr + position), least))",
        [0, 0, 0, 1],
    ),
    "whole_pieces": (
        "tl.range(0, length - 1, SPAN)",
        "tl.range(0, length - SPAN, SPAN)",
        [0, 0, 1, 0],
    ),
    "one_entry": (
        "least = _least(entry_ptr, CYCLIC)\n        unordered",
        "least = _least(ids_ptr, CYCLIC)\n        unordered",
        [0, 1, 1, 1],
    ),
    "across_entries": (
        "tl.arange(0, SPAN), length - 2)",
        "tl.arange(0, SPAN), length - 1)",
        [1, 0, 1, 1],
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_found(slip: str) -> None:
    right, wrong, found = SLIPS[slip]

    def edited(source: str) -> str:
        assert source.count(right) == 1, "the kernel no longer reads so"
        return source.replace(right, wrong)

    module = rendered_module(CUT["causal"], hopper=True, edit_source=edited)
    assert _looks(module)[0] == found


def test_many_entries() -> None:
    """More of them than are joined at a time, with more tiles than are copied at a time."""
    length = 17 * BLOCK_M
    ids = ids_of(LENGTHS, 131, length, 4)
    _check(ids, 131, chunk=64)
