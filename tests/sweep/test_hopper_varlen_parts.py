"""The order of packed sequences' tiles of keys in the Gluon backward pass, and their parts."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Int, causal, full, sliding_window
from support.cases import Case
from support.gluon import interpreted, start_over
from support.packed import Packing, hold_hopper_varlen_backward, packed
from support.variants import rendered_module

FORMS = ("dense", "varlen")

#: Tiles in one run of columns and in segments, whose lengths differ by the mask and by sequences.
#: With slopes by head the loop over query heads is outermost.
SPECS = {
    "causal_d128": AttentionSpec(128, mask=causal(), forms=FORMS),
    "full_d64": AttentionSpec(64, "float16", mask=full(), forms=FORMS),
    "window_d80": AttentionSpec(
        80, mask=sliding_window(Int("left", 70), 3), align="bottom_right", forms=FORMS
    ),
    "slopes_d64": AttentionSpec(
        64, mask=causal(), score=lambda s, b, h, q, kv: s - (q - kv) * (h + 1) * 0.01, forms=FORMS
    ),
    "unequal_d96": AttentionSpec((96, 72), mask=causal(), align="bottom_right", forms=FORMS),
}
PROGRAMS = 12
ALIKE = (30, 0, 260, 1, 140)
ROOMY = ((70, 0, 150, 1, 10, 33), (9, 40, 130, 0, 200, 164), (0, 3, 20, 2, 70, 0))
#: Two heads of queries in each tile, one in each part, or two in each.
CASES = [(name, *of) for name in SPECS for of in (((4, 2), 4), ((3, 1), PROGRAMS))]
CASES += [(name, (8, 1), PROGRAMS) for name in ("causal_d128", "slopes_d64")]
CASES += [("full_d64", (2, 2), PROGRAMS)]


def _packing(name: str, heads: tuple[int, int]) -> Packing:
    case = Case(0, 0, q_heads=heads[0], kv_heads=heads[1])
    if SPECS[name].equal_lengths:
        return Packing(ALIKE, case=case)
    return Packing(*ROOMY, case=case)


@functools.cache
def _module(name: str) -> ModuleType:
    module = rendered_module(SPECS[name], name=name, hopper=True, edit_source=interpreted)
    module._num_sms = lambda device: PROGRAMS  # type: ignore[attr-defined]
    return module


def test_gradients_of_more_heads_than_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last heads all tiles come together; the others one after another."""
    module, packing = _module("causal_d128"), _packing("causal_d128", (3, 3))
    monkeypatch.setattr(module, "_num_sms", lambda device: 2)
    hold_hopper_varlen_backward(module, SPECS["causal_d128"], packing, module.BACKWARD_HOPPER)


@pytest.mark.parametrize(("name", "heads", "programs"), CASES, ids=str)
def test_gradients(
    name: str, heads: tuple[int, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _module(name)
    monkeypatch.setattr(module, "_num_sms", lambda device: programs)
    hold_hopper_varlen_backward(module, SPECS[name], _packing(name, heads), module.BACKWARD_HOPPER)


def _gradients(module: ModuleType, name: str, packing: Packing) -> tuple[torch.Tensor, ...]:
    call = packed(SPECS[name], packing, torch.bfloat16)
    scale = SPECS[name].qk_head_dim ** -0.5
    out, lse = module.varlen_reference(
        *(x.double() for x in call.qkv), **call.lengths, scale=scale, return_lse=True
    )
    given = (out.bfloat16(), lse.float(), torch.ones_like(out, dtype=torch.bfloat16), None)
    grads: tuple[torch.Tensor, ...] = module._varlen_backward_kernels_hopper(
        *call.qkv, *call.lengths.values(), scale, *given, module.BACKWARD_HOPPER
    )
    return grads


def _ordered(
    name: str, packing: Packing, monkeypatch: pytest.MonkeyPatch, programs: int = PROGRAMS
) -> tuple[list[dict[str, int]], list[list[int]]]:
    """The pieces of a head as its kernel finds them; tiles in parts."""
    module, found = _module(name), []
    monkeypatch.setattr(module, "_num_sms", lambda device: programs)
    place = module._place_packed_sums

    class Placing:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                found.append((args[7].clone(), args[13]))
                place[grid](*args, **constants)

            return launch

    monkeypatch.setattr(module, "_place_packed_sums", Placing())
    _gradients(module, name, packing)
    [(numbers, most_pieces)] = found
    fields = [
        "batch", "kv_head", "kv_first", "q_start", "q_len", "kv_start", "kv_len", "room",
        "rows_start", "first_member", "end_member", "part", "turned",
    ]  # fmt: skip
    width = len(fields)
    num_pieces, num_parts, num_divided = numbers[:3].tolist()
    assert num_pieces <= most_pieces and num_parts * packing.case.kv_heads <= 8 * programs
    rows = numbers[width : width * (1 + num_pieces)].view(-1, width).tolist()
    behind = width * (1 + most_pieces)
    divided = numbers[behind : behind + 4 * num_divided].view(-1, 4).tolist()
    assert sum(count for *_, count in divided) == num_parts
    return [dict(zip(fields, row, strict=True)) for row in rows], divided


@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (4, 4)], ids=str)
def test_each_head_of_each_tile_once_and_the_longest_first(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    packing, group = _packing("causal_d128", heads), heads[0] // heads[1]
    pieces, divided = _ordered("causal_d128", packing, monkeypatch)
    visits = [-(-x["q_len"] // 64) - x["kv_first"] // 64 for x in pieces]
    lengths = [
        n * (x["end_member"] - x["first_member"]) for n, x in zip(visits, pieces, strict=True)
    ]
    tiles = {(b, first) for b, n in enumerate(ALIKE) for first in range(0, n, 128)}
    members = [
        (x["batch"], x["kv_first"], member)
        for x in pieces
        for member in range(x["first_member"], x["end_member"])
    ]
    assert sorted(members) == sorted((*tile, i) for tile in tiles for i in range(group))
    assert len({x["end_member"] - x["first_member"] for x in pieces}) == 1
    assert lengths == sorted(lengths, reverse=True)
    # No part exceeds a program's share by more than a head.
    total = sum(lengths) * heads[1]
    share = -(-total // PROGRAMS)
    assert all(n < share + m for n, m in zip(lengths, visits, strict=True)) or group == 1
    parts = sorted(x["part"] for x in pieces if x["part"] >= 0)
    assert parts == list(range(len(parts))) and bool(parts) == (group > 1)
    known = {
        (first, room, x["kv_start"] + x["kv_first"], x["room"] - x["kv_first"])
        for first, room, part, count in divided
        for x in pieces
        if part <= x["part"] < part + count
    }
    assert len(known) == len(divided)
    assert all(first == of_piece and room == rest for first, room, of_piece, rest in known)


def test_only_long_tiles_are_divided_if_parts_of_all_need_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By 8 for each program: the longest tile takes more than one's share, 59 others little."""
    packing = Packing((300, *[1] * 60), case=Case(0, 0, q_heads=4, kv_heads=2))
    pieces, divided = _ordered("causal_d128", packing, monkeypatch, programs=31)
    assert [(x["batch"], x["kv_first"]) for x in pieces if x["part"] >= 0] == [(0, 0)] * 2
    assert len(pieces) == 64 and len(divided) == 1


def _same_bits(monkeypatch: pytest.MonkeyPatch, turned: str = "work_tile.turned") -> bool:
    """Whether dk and dv are the same whoever computes them.

    One program after another runs here. In one case the first takes all tiles that are left, in the
    other each takes three of them.
    """
    # Of many visits and elements, since 16 bits hide most differences of sums.
    packing = Packing((520, 400), case=Case(0, 0, q_heads=4, kv_heads=2))
    grads = []
    taken = "taken = gl.atomic_add(counter_ptr, 1)"
    for course, fair in ((1, taken), (5, f"{taken} if count < 4 else num_tiles")):

        def edit(source: str, fair: str = fair) -> str:
            kernel = source.index("def _backward_producer_varlen")
            before, rest = source[:kernel], source[kernel:]
            assert taken in rest and rest.count("work_tile.turned") == 2
            rest = rest.replace(taken, fair, 1).replace("work_tile.turned", turned)
            return interpreted(before + rest)

        module = rendered_module(
            SPECS["causal_d128"], name="causal_d128", hopper=True, edit_source=edit
        )
        monkeypatch.setattr(module, "_num_sms", lambda device: PROGRAMS)
        start_over(course)
        grads.append(_gradients(module, "causal_d128", packing))
    return all(torch.equal(x, y) for x, y in zip(grads[0][1:], grads[1][1:], strict=True))


def test_gradients_of_keys_are_the_same_bits_whoever_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts are stored, and added up in their order: those of queries alone meet in any."""
    assert _same_bits(monkeypatch)


def test_an_order_by_what_a_program_had_before_has_other_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not _same_bits(monkeypatch, turned="1 - count % 2")


#: Faults where tiles are in parts, or in another order than sequences: by what is replaced, and
#: the variant, heads and programs that show each.
CAUSAL, FULL = ("causal_d128", (6, 2), 12), ("full_d64", (6, 2), 12)
WHOLE = ("causal_d128", (4, 2), 4)
MUTANTS = [
    ("part + number, -1)", "number, -1)", CAUSAL),
    ("kv_head * parts_of_head + part", "part", CAUSAL),
    ("group * number // tl.maximum(parts, 1)", "number", ("causal_d128", (5, 1), 4)),
    ("ptrs = pieces_ptr + (1 + place + number) * 13", "ptrs = pieces_ptr + (1 + place) * 13",
     CAUSAL),
    ("(lengths[None, :] == longest[:, None]) & before", "(lengths[None, :] == longest[:, None])",
     CAUSAL),
    ("tl.store(ptrs + 1, room - kv_first, m", "tl.store(ptrs + 1, room - kv_first - 1, m", FULL),
    ("gl.where(turned == 1, runs.visits - 1 - number, number)", "number", WHOLE),
    ("gl.where(turned == 1, runs.masked_visits - before, before)", "before", WHOLE),
    ("rows_of_head = rows_len * 4", "rows_of_head = rows_len * 2", WHOLE),
    ("visit - number * num_members", "0 * visit", WHOLE),
    ("tl.store(ptrs, kv_start + kv_first, mask=held)", "tl.store(ptrs, kv_start, mask=held)",
     CAUSAL),
    ("for other in tl.range(1, num_parts):\n        sums += tl.load(sums_ptr + 32768 * other + pl",
     "for other in tl.range(2, num_parts):\n        sums += tl.load(sums_ptr + 32768 * other + pl",
     CAUSAL),
    ("part = head * num_parts + tl.load", "part = tl.load", CAUSAL),
    ("(4 * part + 2 * half + of_values)", "(4 * part + half + of_values)", CAUSAL),
    ("kv_head = first + group * together", "kv_head = group * together",
     ("causal_d128", (3, 3), 2)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "shown"), MUTANTS, ids=[x[1] for x in MUTANTS])
def test_a_fault_is_found(before: str, after: str, shown: tuple[str, tuple[int, int], int]) -> None:
    def edit(source: str) -> str:
        assert source.count(before) == 1
        return interpreted(source.replace(before, after))

    name, heads, programs = shown
    mutant = rendered_module(SPECS[name], name=name, hopper=True, edit_source=edit)
    mutant._num_sms = lambda device: programs  # type: ignore[attr-defined]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        packing = _packing(name, heads)
        hold_hopper_varlen_backward(mutant, SPECS[name], packing, mutant.BACKWARD_HOPPER)
