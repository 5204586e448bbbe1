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
SPECS = {
    "causal_d128": AttentionSpec(128, mask=causal(), forms=FORMS),
    "full_d64": AttentionSpec(64, "float16", mask=full(), forms=FORMS),
    "window_d80": AttentionSpec(
        80, mask=sliding_window(Int("left", 70), 3), align="bottom_right", forms=FORMS
    ),
    "unequal_d96": AttentionSpec((96, 72), mask=causal(), align="bottom_right", forms=FORMS),
}
PROGRAMS = 12
ALIKE = (30, 0, 260, 1, 140)
ROOMY = ((70, 0, 150, 1, 10, 33), (9, 40, 130, 0, 200, 164), (0, 3, 20, 2, 70, 0))
CASES = [(name, heads) for name in SPECS for heads in ((4, 2), (3, 1))]
CASES += [("full_d64", (2, 2))]


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


@pytest.mark.parametrize(("name", "heads"), CASES, ids=str)
def test_gradients(name: str, heads: tuple[int, int]) -> None:
    module = _module(name)
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
    name: str, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, int]], list[list[int]]]:
    """The pieces of a head as its kernel finds them; tiles in parts."""
    module, found = _module(name), []
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
        "rows_start", "first_member", "end_member", "part",
    ]  # fmt: skip
    width = len(fields)
    num_pieces, num_parts, num_divided = numbers[:3].tolist()
    assert num_pieces <= most_pieces and num_parts * packing.case.kv_heads <= 3 * PROGRAMS
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
    # Parts of a tile differ by one head of queries at most.
    longest = [
        max(n for n, y in zip(lengths, pieces, strict=True) if _tile(y) == _tile(x)) for x in pieces
    ]
    assert longest == sorted(longest, reverse=True)
    # No part exceeds a program's share by more than a head.
    total = sum(lengths) * heads[1]
    share = -(-2 * total // (PROGRAMS * (3 if heads[1] == 1 else 2)))
    alone = [n for n, x in zip(lengths, pieces, strict=True) if x["part"] < 0]
    assert all(n <= share for n in alone) or group == 1
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


def _tile(piece: dict[str, int]) -> tuple[int, int]:
    return piece["batch"], piece["kv_first"]


def test_gradients_of_keys_are_the_same_bits_in_any_order() -> None:
    """Parts are stored, and added up in their order: those of queries alone meet in any."""
    grads = []
    for course in (1, 5):
        start_over(course)
        grads.append(
            _gradients(_module("causal_d128"), "causal_d128", _packing("causal_d128", (6, 2)))
        )
    assert all(torch.equal(x, y) for x, y in zip(grads[0][1:], grads[1][1:], strict=True))


#: Faults where tiles are in parts, or in another order than sequences: by what is replaced, and
#: the variant, heads and programs that show each.
CAUSAL, FULL = ("causal_d128", (6, 2), 12), ("full_d64", (6, 2), 12)
MUTANTS = [
    ("part + number, -1)", "number, -1)", CAUSAL),
    ("kv_head * parts_of_head + part", "part", CAUSAL),
    ("group * number // tl.maximum(parts, 1)", "number", ("causal_d128", (5, 1), 4)),
    ("ptrs = pieces_ptr + (1 + place + number) * 12", "ptrs = pieces_ptr + (1 + place) * 12",
     CAUSAL),
    ("(lengths[None, :] == longest[:, None]) & before", "(lengths[None, :] == longest[:, None])",
     CAUSAL),
    ("tl.store(ptrs + 1, room - kv_first, mask=held)", "tl.store(ptrs + 1, room, mask=held)", FULL),
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
