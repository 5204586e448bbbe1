"""Masks that read block tables: the kernel that lists tiles, and the one that visits them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Mask,
    Tensor,
    bigbird,
    block_sparse,
    causal,
    dilated,
    document,
    kv_len,
    q_len,
    sliding_window,
)
from support.cases import Case, inputs
from support.oracle import check
from support.turns import in_turns
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.launch import check_kernel


def _table(name: str, rows: int, columns: int, *lead: str) -> Tensor:
    sizes = ((q_len + rows - 1) // rows, (kv_len + columns - 1) // columns)
    return Tensor(name, (*lead, *sizes), "bool")


def _blocks(name: str, rows: int, columns: int) -> Mask:
    table = _table(name, rows, columns)
    return Mask(lambda b, h, q, kv: table[q // rows, kv // columns], name)


_HEADS, _BATCH = ("num_q_heads",), ("batch",)
_SMALL = Tensor("small", (2, 3), "bool")
_TURNED = Tensor("turned", ((kv_len + 11) // 12, (q_len + 19) // 20), "bool")
_SHIFTED = Tensor("shifted", (q_len // 16 + 2, 3 * kv_len // 50 + 2), "bool")
_LIMITS = Tensor("limits", ("q_len",), "int32")
_STATIC = [[[(i + 2 * j + h) % 5 < 2 for j in range(6)] for i in range(5)] for h in range(2)]

MASKS: dict[str, Mask] = {
    "smaller_than_tiles": block_sparse(_table("layout", 5, 5, *_HEADS), 5),
    "larger_than_tiles": block_sparse(_table("layout", 48, 48, *_BATCH), 48),
    "of_a_batch_entry_and_head": block_sparse(_table("layout", 16, 16, *_BATCH, *_HEADS), 16),
    "shared": block_sparse(_table("layout", 24, 24), 24),
    "tiny": block_sparse(_table("layout", 2, 2), 2),
    "turned": Mask(lambda b, h, q, kv: _TURNED[kv // 12, q // 20], "turned"),
    "shifted": Mask(lambda b, h, q, kv: _SHIFTED[(q + 5) // 16, (3 * kv + 20) // 50], "shifted"),
    "oblong": _blocks("layout", 40, 7),
    "hidden": ~block_sparse(block=16),
    "static_by_head": block_sparse(_STATIC, 16),
    "static_and_causal": causal(align="bottom_right") & ~block_sparse(_STATIC[1], 20),
    "static_and_passed": block_sparse(_STATIC[0], 16) & block_sparse(_table("other", 9, 9), 9),
    "causal": causal(align="bottom_right") & block_sparse(block=16),
    "window_and_hidden": sliding_window(Int("left", 20), 3, align="top_left") & ~_blocks("a", 9, 6),
    "two": block_sparse(block=10) | ~block_sparse(_table("other", 48, 48, *_BATCH), 48),
    "documents": document(align="top_left") & block_sparse(block=24),
    "rows_of_a_tile": Mask(lambda b, h, q, kv: _LIMITS[q] >= kv, "limits") & _blocks("a", 8, 8),
    "never_full": dilated(3, align="top_left") & block_sparse(block=16),
    "always_seen": dilated(3, align="top_left") | block_sparse(block=16),
    # Outside of it is 0, for the eager reference too: no index that is shown lies there.
    "table_of_a_part": Mask(
        lambda b, h, q, kv: (q < 32) & (kv < 24) & _SMALL[q % 32 // 16, kv % 24 // 8], "part"
    )
    | _blocks("layout", 16, 16),
}


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(_spec(name))


def _spec(name: str, dtype: str = "float32") -> AttentionSpec:
    return AttentionSpec(16, dtype, mask=MASKS[name])


LENGTHS = [(1, 1), (33, 50), (50, 33), (64, 64), (1, 90)]


CALLS = [(i, *tile) for i in range(len(LENGTHS)) for tile in ((32, 16), (16, 32))]


@pytest.mark.parametrize(("name", "i", "block_m", "block_n"), in_turns(MASKS, CALLS, every=13))
def test_kernels(name: str, i: int, block_m: int, block_n: int) -> None:
    layout = ("contiguous", "padded")[i % 2]
    case = Case(*LENGTHS[i], batch=2, q_heads=2, kv_heads=1, layout=layout)
    check_kernel(_module(name), _spec(name), case, BLOCK_M=block_m, BLOCK_N=block_n)


def test_more_tiles_than_are_listed_at_a_time() -> None:
    check_kernel(_module("causal"), _spec("causal"), Case(3, 128 * 16 + 40))


GRADIENTS = [(33, 50, 32, 16), (50, 33, 16, 32), (64, 64, 16, 32)]


@pytest.mark.parametrize(("name", "q_len", "kv_len", "m", "n"), in_turns(MASKS, GRADIENTS, every=6))
def test_backward_kernels(name: str, q_len: int, kv_len: int, m: int, n: int) -> None:
    case = Case(q_len, kv_len, batch=2, q_heads=2, kv_heads=1)
    check_backward(_module(name), _spec(name), case, BLOCK_M=m, BLOCK_N=n)


def test_more_tiles_of_queries_than_are_turned_at_a_time() -> None:
    check_backward(_module("causal"), _spec("causal"), Case(128 * 16 + 40, 3), BLOCK_M=16)


def _listed(
    module: ModuleType, case: Case, tables: list[torch.Tensor], block_m: int, block_n: int
) -> list[list[int]]:
    """The lists of a mask that reads heads, CHUNK tiles at a time."""
    lists = case.q_heads * -(-case.q_len // block_m)
    tiles = torch.full((lists, -(-case.kv_len // block_n) + 1), 10**6, dtype=torch.int32)
    arguments = [x for table in tables for x in (table, *table.shape, *table.stride())]
    module._list_tiles[(lists,)](
        tiles, case.q_heads, case.q_len, case.kv_len, *arguments,
        BLOCK_M=block_m, BLOCK_N=block_n, CHUNK=4,
    )  # fmt: skip
    return [row[1 : 1 + row[0]] for row in tiles.tolist()]


@pytest.mark.parametrize("block", [8, 16, 24])
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32), (16, 16)])
def test_each_tile_is_listed_as_what_it_is(block: int, block_m: int, block_n: int) -> None:
    """In ascending order, without those that hold no visible key; masked where one is hidden."""
    mask = block_sparse(block=block)
    module = rendered_module(AttentionSpec(16, "float32", mask=mask))
    case = Case(70, 150, q_heads=3, kv_heads=3)
    layout = case.arguments(AttentionSpec(16, "float32", mask=mask))["layout"]
    rows, keys = torch.arange(case.q_len) // block, torch.arange(case.kv_len) // block
    visible = layout[:, rows[:, None], keys]
    expected = []
    for head in visible:
        for band in head.split(block_m):
            tiles = list(enumerate(band.split(block_n, dim=1)))
            full = [bool(tile.all()) and tile.shape[1] == block_n for _, tile in tiles]
            expected.append([2 * i + (not full[i]) for i, tile in tiles if tile.any()])
    assert _listed(module, case, [layout], block_m, block_n) == expected
    assert block == 8 or {entry % 2 for entries in expected for entry in entries} == {0, 1}
    assert min(map(len, expected)) < -(-case.kv_len // block_n)


@pytest.mark.parametrize("block", [8, 16, 24])
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 32), (16, 16)])
def test_turned_lists_hold_the_same_pairs_of_tiles(block: int, block_m: int, block_n: int) -> None:
    """In ascending order; where a tile of queries reaches past the last one, it is masked."""
    spec = AttentionSpec(16, "float32", mask=block_sparse(block=block))
    module = rendered_module(spec)
    case = Case(70, 150, q_heads=3, kv_heads=3)
    layout = case.arguments(spec)["layout"]
    q = inputs(case, spec, torch.float32)[0]
    tiles = module._listed(q, case.kv_len, block_m, block_n, layout)
    turned = module._transposed(q, tiles, block_m).tolist()
    num_tiles_m, num_tiles_n = -(-case.q_len // block_m), -(-case.kv_len // block_n)
    expected: list[list[int]] = [[] for _ in range(3 * num_tiles_n)]
    for i, (count, *entries) in enumerate(tiles.tolist()):
        head, tile_m = divmod(i, num_tiles_m)
        ragged = (tile_m + 1) * block_m > case.q_len
        for entry in entries[:count]:
            masked = ragged or entry % 2
            expected[head * num_tiles_n + entry // 2].append(2 * tile_m + masked)
    assert [row[1 : 1 + row[0]] for row in turned] == expected
    assert min(map(len, expected)) < num_tiles_m


CLEAN: dict[str, tuple[Mask, Callable[[Case], dict[str, Any]]]] = {
    "block_sparse": (block_sparse(block=32), lambda case: {}),
    "causal": (causal() & block_sparse(block=32), lambda case: {}),
    "bigbird": (
        bigbird(32, window=1, global_blocks=0),
        lambda case: {"random_blocks": torch.zeros(1, 3, 3, dtype=torch.bool)},
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_hidden_tiles_are_not_visited(name: str) -> None:
    """Keys and values that no query of a tile sees can be NaN: nobody reads them."""
    mask, values = CLEAN[name]
    spec = AttentionSpec(16, "float32", mask=mask)
    module = rendered_module(spec)
    layout = torch.tensor([[[1, 0, 1], [1, 0, 0], [0, 0, 1]]], dtype=torch.bool)
    case = Case(96, 96, params={"layout": layout, **values(Case(96, 96))})
    case = replace(case, params={p.name: case.params[p.name] for p in spec.params})
    q, k, v = inputs(case, spec, torch.float32)
    q, k, v = (x.clone() for x in (q, k, v))
    hidden = slice(64, 96) if name == "bigbird" else slice(32, 64)
    q_seen = 64 if name == "bigbird" else 96
    config = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "USE_TMA": False}
    arguments = case.arguments(spec).values()
    clean = module._launch(q, k, v, 0.25, *arguments, config)
    check(*clean, (q, k, v), spec, replace(case, scale=0.25))
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
    poisoned = module._launch(q, k, v, 0.25, *arguments, config)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a[:, :, :q_seen], b[:, :, :q_seen])


@pytest.mark.parametrize("name", CLEAN)
def test_queries_of_hidden_tiles_are_not_visited(name: str) -> None:
    """Queries that see no key of a tile can be NaN for its gradients: nobody reads them."""
    mask, values = CLEAN[name]
    spec = AttentionSpec(16, "float32", mask=mask)
    module = rendered_module(spec)
    layout = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    case = Case(96, 96, params={"layout": layout, **values(Case(96, 96))})
    case = replace(case, params={p.name: case.params[p.name] for p in spec.params})
    q, k, v = (x.clone() for x in inputs(case, spec, torch.float32))
    # Of the last tile of keys: seen by the last queries, or with bigbird by neighbours too.
    hidden = slice(0, 32) if name == "bigbird" else slice(0, 64)
    seen = slice(64, 96)
    config = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2, "USE_TMA": False}
    arguments = list(case.arguments(spec).values())
    out, lse = module._launch(q, k, v, 0.25, *arguments, config)
    found = []
    for poison in (0.0, torch.nan):
        q = q.clone()
        q[:, :, hidden] += poison
        grad_out, grad_lse = torch.ones_like(out), torch.zeros_like(lse)
        grads = module._backward_kernels(
            q, k, v, 0.25, *arguments, out, lse, grad_out, grad_lse, config, config
        )
        found.append([x[:, :, seen] for x in grads[1:3]])
    for a, b in zip(*found, strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b)


EDITS = {
    "off_by_one_in_the_list": ("tiles_ptr + 1 + visit", "tiles_ptr + visit"),
    "never_masked": ("entry % 2 == 1", "entry < 0"),
    "masks_the_others": ("tl.where(full, 0, 1)", "tl.where(full, 1, 0)"),
    "one_row_of_blocks": ("q_last // 16 + 1):", "q_first // 16 + 1):"),
    "one_column_of_blocks": ("in tl.range(0, columns)", "in tl.range(0, 1)"),
    "full_past_the_end": ("full = kv_first + BLOCK_N <= kv_len", "full = kv_first < kv_len"),
    "another_head": ("head = pid // num_tiles_m", "head = pid // num_tiles_m // 2"),
    "starts_over": ("count += tl.sum(visited, 0)", "count = tl.sum(visited, 0)"),
    "some_are_all": ("all_shown &= shown", "all_shown |= shown"),
    "one_row_of_a_tile": ("tl.static_range((BLOCK_M + 15) // 16)", "tl.static_range(1)"),
    "one_column_of_a_tile": ("tl.static_range((BLOCK_N + 15) // 16)", "tl.static_range(1)"),
    "the_last_row_alone": ("shown_rows |= ", "shown_rows = "),
    "from_the_first_column": ("block_column = start_n // 16 + i", "block_column = i"),
    "from_the_first_row": ("block_row = q_first // 16 + j", "block_row = j"),
}


def _survives(edit: tuple[str, str] | None) -> bool:
    window = sliding_window(75, 30, align="bottom_right")
    spec = AttentionSpec(16, "float32", mask=window & ~block_sparse(block=16))

    def edited(source: str) -> str:
        # The backward kernel that visits keys may have the same line.
        forward, _, _ = source.partition("def _backward_rows(")
        assert edit is None or forward.count(edit[0]) == 1, forward.count(edit[0])
        # Few tiles at a time, so that there are several times.
        return (source.replace(*edit) if edit else source).replace("CHUNK=128", "CHUNK=2")

    module = rendered_module(spec, edit_source=edited)
    cases = [Case(75, 75, q_heads=4, kv_heads=2), Case(40, 90, batch=2, q_heads=2, kv_heads=2)]
    try:
        for case in cases:
            check_kernel(module, spec, case, BLOCK_M=32, BLOCK_N=32)
    except AssertionError:
        return False
    return True


def test_the_right_kernel_survives() -> None:
    assert _survives(None)


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_kernel_does_not(name: str) -> None:
    assert not _survives(EDITS[name])


TURNED_EDITS = {
    "off_by_one_in_the_list": ("listed_ptr + 1 + visit", "listed_ptr + visit"),
    "another_list": ("(first_list + tile)", "(first_list + tile // 2)"),
    "the_entry_after": ("list_ptrs + 1 + below", "list_ptrs + 2 + below"),
    "not_halved_to_the_end": ("num_tiles_n.bit_length()", "num_tiles_n.bit_length() - 1"),
    "another_head": ("listed = head * num_tiles_n", "listed = head // 2 * num_tiles_n"),
    "never_masked": ("tl.where(ragged, 1, entry & 1)", "tl.where(ragged, 0, 0)"),
    "starts_over": ("count += tl.sum(visiting, 0)", "count = tl.sum(visiting, 0)"),
}


def _turned_survives(edit: tuple[str, str] | None) -> bool:
    window = sliding_window(75, 30, align="bottom_right")
    spec = AttentionSpec(16, "float32", mask=window & ~block_sparse(block=16))

    def edited(source: str) -> str:
        forward, name, backward = source.partition("def _backward_rows(")
        assert edit is None or backward.count(edit[0]) == 1, backward.count(edit[0])
        backward = backward.replace(*edit) if edit else backward
        return forward + name + backward.replace("CHUNK=128", "CHUNK=2")

    module = rendered_module(spec, edit_source=edited)
    cases = [Case(75, 75, q_heads=4, kv_heads=2), Case(90, 140, batch=2, q_heads=2, kv_heads=2)]
    try:
        for case in cases:
            check_backward(module, spec, case, BLOCK_M=32, BLOCK_N=32)
    except AssertionError:
        return False
    return True


def test_the_right_turned_lists_survive() -> None:
    assert _turned_survives(None)


@pytest.mark.parametrize("name", TURNED_EDITS)
def test_wrong_turned_lists_do_not(name: str) -> None:
    assert not _turned_survives(TURNED_EDITS[name])
