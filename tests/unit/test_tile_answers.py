"""A mask on tiles, by what it reads of their rows and keys, beside brute force on its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import given

from flashgen import Mask, Tensor, causal, document, kv_len, q_len
from flashgen.symbolic import tile_answers as answering
from flashgen.symbolic import trace
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.tile_answers import OfTile, TileAnswers, left_to_data, tile_answers
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import FloorMod, evaluate
from support.visits import Call, sweep
from unit.test_bounds_random import ANYTHING, blocks, calls, mask_of, predicates

TILE = 4

MASKS_OF_ALL_KINDS = predicates(st.one_of(ANYTHING, blocks())).map(mask_of)


def _ends(read: OfTile, values: dict[str, Any]) -> dict[str, Any]:
    """What the kernel computes of a tile's rows, or keys."""
    name = "q" if read.over == Axes.ROW else "kv"
    rows = range(values[f"{name}_first"], values[f"{name}_last"] + 1)
    found = [evaluate(read.expr, {**values, f"{name}_idx": i}) for i in rows]
    least, most = (any(found), all(found)) if read.is_condition else (min(found), max(found))
    return dict(zip((end.name for end in read.ends), (least, most), strict=True))


def _tiles(mask: Mask, call: Call) -> dict[str, int]:
    """How many tiles are decided, and left open; fails where an answer is wrong."""
    answers: TileAnswers = answering.tile_answers(trace(mask), TILE)
    shown = call.matrix(mask)
    counts = {"decided": 0, "open": 0}
    for q_first in range(0, call.q, TILE):
        for kv_first in range(0, call.kv, TILE):
            values = {
                **call.values,
                "q_first": q_first, "q_last": min(q_first + TILE, call.q) - 1,
                "kv_first": kv_first, "kv_last": min(kv_first + TILE, call.kv) - 1,
            }  # fmt: skip
            for read in answers.reads:
                values |= _ends(read, values)
            seen, full, shown_, whole = (
                bool(evaluate(x, values))
                for x in (answers.seen, answers.full, answers.shown, answers.whole)
            )
            tile = [row[kv_first : kv_first + TILE] for row in shown[q_first : q_first + TILE]]
            assert seen or not any(map(any, tile)), f"a visible element is skipped at {values}"
            assert not full or all(map(all, tile)), f"a hidden element is called full at {values}"
            assert seen or not full
            assert not shown_ or any(map(any, tile)), f"no element is visible at {values}"
            assert whole or not all(map(all, tile)), f"no element is hidden at {values}"
            counts["open" if seen and not full else "decided"] += 1
    return counts


@sweep(300)
@given(MASKS_OF_ALL_KINDS, calls())
def test_any_predicate_is_answered_soundly(mask: Mask, call: Call) -> None:
    _tiles(mask, call)


def _unaware(self: Any, expr: Any) -> Any:
    """Remainders as if no multiple of the divisor could lie between two numbers."""
    ends = self._divided(expr)
    return None if ends is None else tuple(FloorMod(end, expr.args[1]) for end in ends)


def _unfolded(self: Any, expr: Any) -> Any:
    return self._ends(expr.args[0])


def _unsigned(self: Any, expr: Any) -> Any:
    found = RIGHT._product(self, expr)
    return None if found is None else found[::-1]


RIGHT = answering._Answers

#: Rules that are wrong where the expressions of a tile turn, and conditions joined wrongly.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "remainders_ascend": lambda patch: patch.setitem(answering._RULES, FloorMod, _unaware),
    "nothing_is_negative": lambda patch: patch.setitem(answering._RULES, sympy.Abs, _unfolded),
    "factors_are_positive": lambda patch: patch.setitem(answering._RULES, sympy.Mul, _unsigned),
    "any_block_is_one": lambda patch: patch.setattr(
        answering, "tile_answers", lambda predicate, tile: tile_answers(predicate, 1)
    ),
}


#: One mask for each of them.
FOUND_BY = {
    "remainders_ascend": lambda b, h, q, kv: (q + kv) % 6 < 3,
    "nothing_is_negative": lambda b, h, q, kv: abs(q - kv) <= 5,
    "factors_are_positive": lambda b, h, q, kv: -2 * abs(q - kv) > -9,
    "any_block_is_one": lambda b, h, q, kv: q // 3 == kv // 3,
}
CALL = Call(30, 22, TILE, TILE, {})


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_answers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Mask(FOUND_BY[name], name)
    assert min(_tiles(mask, CALL).values()) > 0
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        _tiles(mask, CALL)


IMG = Tensor("img", ("batch", "kv_len"), "int32")
FLAG = Tensor("flag", ("kv_len",), "bool")
GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")
DENSE = Tensor("dense", ("q_len", "kv_len"), "bool")
LAYOUT = Tensor("layout", ((q_len + 63) // 64, (kv_len + 63) // 64), "bool")

MASKS = {
    "islands": (
        lambda b, h, q, kv: (kv <= q) | ((IMG[b, q] == IMG[b, kv]) & (IMG[b, q] > 0)),
        "(q_last >= kv_first) | (some_of_rows_0 & (least_of_rows_1 <= most_of_keys_0)"
        " & (most_of_rows_1 >= least_of_keys_0))",
    ),
    "flags": (
        lambda b, h, q, kv: FLAG[q] | FLAG[kv] | (abs(q - kv) <= 128),
        "some_of_keys_0 | some_of_rows_0"
        " | (max(0, max(q_first - kv_last, kv_first - q_last)) <= 128)",
    ),
    "gate": (
        lambda b, h, q, kv: (kv <= q) & GATE[h, q, kv // 64],
        "some_of_rows_0 & (q_last >= kv_first)",
    ),
    "dense": (lambda b, h, q, kv: DENSE[q, kv], "True"),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_asked_of_a_tile(name: str) -> None:
    mask_mod, expected = MASKS[name]
    predicate = trace(Mask(mask_mod, name))
    assert left_to_data(predicate)
    assert plain_source(tile_answers(predicate).seen) == expected


@pytest.mark.parametrize("mask", [causal(), document(), causal() & document()], ids=str)
def test_algebra_alone_answers_these(mask: Mask) -> None:
    assert not left_to_data(trace(mask))


KEEP = Tensor("keep", ("batch", "kv_len"), "bool")


@pytest.mark.parametrize(
    ("mask_mod", "left"),
    [
        (lambda b, h, q, kv: (kv <= q) & KEEP[b, kv], False),
        (lambda b, h, q, kv: ((kv <= q) | (kv < 64)) & KEEP[b, kv], False),
        (lambda b, h, q, kv: (kv <= q) | KEEP[b, kv], True),
    ],
    ids=["padding", "padding of a prefix", "keys that all see besides"],
)
def test_ranges_of_keys_answer_what_all_elements_meet(mask_mod: Any, left: bool) -> None:
    predicate = trace(Mask(mask_mod, "of keys"))
    assert left_to_data(predicate)
    assert bool(left_to_data(predicate, ranges=True)) == left
