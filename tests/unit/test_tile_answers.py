"""A mask on tiles, by what it reads of their rows and keys, beside brute force on its elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import Phase, given, settings
from sympy.core.relational import Relational

from flashgen import Mask, Tensor, causal, document, kv_len, maximum, minimum, q_len
from flashgen.symbolic import tile_answers as answering
from flashgen.symbolic import trace
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.tile_answers import OfTile, TileAnswers, left_to_data, tile_answers
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import KV_IDX, Q_IDX, FloorDiv, FloorMod, evaluate
from support.visits import Call, Elements, sweep
from unit.test_bounds_random import (
    ANYTHING,
    KV_ANY,
    Q_ANY,
    RELATIONS,
    Pair,
    blocks,
    calls,
    mask_of,
    predicates,
)

TILE = 4


@st.composite
def of_both(draw: st.DrawFn) -> Pair:
    """A condition on an expression of a query and a key: a difference, wrapped in what turns it."""
    sides: list[Any] = [
        (lambda q: q),
        (lambda q: Q_ANY[0, q]),
        (lambda q: q % 6),
        (lambda q: q // 3 * 2),
    ]
    keys: list[Any] = [
        (lambda k: k),
        (lambda k: KV_ANY[0, k]),
        (lambda k: k % 6),
        (lambda k: k // 3 * 2),
    ]
    of_query, of_key = draw(st.sampled_from(sides)), draw(st.sampled_from(keys))
    factor, shift = draw(st.sampled_from([-3, -1, 1, 2])), draw(st.integers(-9, 9))
    n, m, limit = draw(st.integers(1, 12)), draw(st.integers(-9, 9)), draw(st.integers(-9, 9))
    wraps: list[Any] = [
        lambda x: x,
        lambda x: abs(x),
        lambda x: factor * abs(x),
        lambda x: x % n,
        lambda x: x // n,
        lambda x: factor * (x % n) + abs(x // n),
        lambda x: minimum(x, m),
        lambda x: minimum(abs(x), n) - x // n,
        lambda x: maximum(x, m) - x % n,
    ]
    wrap, compare = draw(st.sampled_from(wraps)), draw(st.sampled_from(RELATIONS))
    return lambda q, kv: compare(wrap(factor * (of_query(q) - of_key(kv)) + shift), limit)


@st.composite
def related(draw: st.DrawFn) -> Pair:
    """What a query has and what a key has, compared, where one of them meets a condition."""
    ids = ((lambda q, kv: Q_ANY[0, q]), (lambda q, kv: KV_ANY[0, kv]))
    compare, holds = draw(st.sampled_from(RELATIONS)), draw(st.sampled_from(RELATIONS))
    one, limit = draw(st.sampled_from(ids)), draw(st.integers(-9, 9))
    return lambda q, kv: compare(ids[0](q, kv), ids[1](q, kv)) & holds(one(q, kv), limit)


#: Conditions of every kind, those of both positions most often.
CONDITIONS = st.one_of(ANYTHING, blocks(), of_both(), of_both(), of_both(), related())
MASKS_OF_ALL_KINDS = predicates(CONDITIONS, depth=1).map(mask_of)


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


def _out_of_order(call: Call) -> Call:
    """Ids in any order, those declared sorted included: tiles are decided by no order."""
    random = Random(call.q)
    docs = {name: x.rows[0] for name, x in call.params.items() if name.endswith("_doc")}
    mixed = {name: Elements([random.sample(row, len(row))]) for name, row in docs.items()}
    return replace(call, params={**call.params, **mixed})


CALLS = calls().map(_out_of_order)


@sweep(600)
@given(MASKS_OF_ALL_KINDS, CALLS)
def test_any_predicate_is_answered_soundly(mask: Mask, call: Call) -> None:
    _tiles(mask, call)


def _rule(of: Any, wrong: Callable[[Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Of a node's bounds: ``wrong(self, node)`` for them, which are None where there are none."""
    right = answering._RULES[of]

    def rule(self: Any, node: Any) -> Any:
        return None if right(self, node) is None else wrong(self, node)

    return lambda patch: patch.setitem(answering._RULES, of, rule)


def _method(name: str, wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    right = getattr(answering._Answers, name)
    return lambda patch: patch.setattr(
        answering._Answers, name, lambda *args: wrong(right(*args), *args)
    )


def _ascending(found: Any, self: Any, expr: Any, over: Any) -> Any:
    """Of one axis, as if nothing fell: not numbers, and not ids."""
    position = Q_IDX if over == Axes.ROW else KV_IDX
    return tuple(expr.xreplace({position: end}) for end in answering._ENDS[position])


def _unaware(self: Any, expr: Any) -> Any:
    """Remainders as if no multiple of the divisor could lie between two numbers."""
    return tuple(FloorMod(end, expr.args[1]) for end in self._divided(expr))


#: Rules that are wrong where the expressions of a tile turn, and conditions joined wrongly.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "remainders_ascend": _rule(FloorMod, _unaware),
    "nothing_is_negative": _rule(sympy.Abs, lambda self, expr: self._ends(expr.args[0])),
    "factors_are_positive": _rule(
        sympy.Mul, lambda self, expr: answering._Answers._product(self, expr)[::-1]
    ),
    "quotients_are_alike": _rule(
        FloorDiv, lambda self, expr: (answering._Answers._quotient(self, expr)[0],) * 2
    ),
    "the_least_of_minima": _rule(
        sympy.Min, lambda self, expr: (answering._Answers._extreme(self, expr)[0],) * 2
    ),
    "all_ascends": _method("_of_one_axis", _ascending),
    "all_hold_where_some_do": _method("_named", lambda found, *args: (found[0],) * 2),
    "some_hold_where_all_do": _method("_named", lambda found, *args: (found[1],) * 2),
    "the_most_of_sums": _method("_sum", lambda found, *args: found and (found[1],) * 2),
    "any_order_is_an_equation": lambda patch: patch.setattr(
        answering, "_equates_axes", lambda part: isinstance(part, Relational)
    ),
    "any_block_is_one": lambda patch: patch.setattr(
        answering, "tile_answers", lambda predicate, tile: tile_answers(predicate, 1)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_answers_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)

    # As many as above; the smallest one is not looked for.
    @settings(sweep(600), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(MASKS_OF_ALL_KINDS, CALLS)
    def run(mask: Mask, call: Call) -> None:
        _tiles(mask, call)

    with pytest.raises(AssertionError):
        run()


def test_remainders_of_both_positions_are_decided() -> None:
    """A rule that leaves all tiles open would be sound."""
    mask = Mask(lambda b, h, q, kv: (q + kv) % 16 < 3, "stripes")
    assert min(_tiles(mask, Call(30, 22, TILE, TILE, {})).values()) > 0


IMG = Tensor("img", ("batch", "kv_len"), "int32")
FLAG = Tensor("flag", ("kv_len",), "bool")
GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")
DENSE = Tensor("dense", ("q_len", "kv_len"), "bool")
LAYOUT = Tensor("layout", ((q_len + 63) // 64, (kv_len + 63) // 64), "bool")

MASKS = {
    "islands": (
        lambda b, h, q, kv: (kv <= q) | ((IMG[b, q] == IMG[b, kv]) & (IMG[b, q] > 0)),
        # That a row has a picture is asked of the key, too, since they have the same one.
        "(q_last >= kv_first) | (some_of_keys_0 & some_of_rows_0"
        " & (least_of_rows_1 <= most_of_keys_1) & (most_of_rows_1 >= least_of_keys_1))",
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
