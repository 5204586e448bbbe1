"""Signs, directions, steps and axioms of terms that are no symbols hold for numbers."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import given

from flashgen import Int, Tensor
from flashgen.symbolic.axioms import axioms_of
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.quotients import ceil_div, floor_div, without_remainders
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import (
    KV_LEN,
    Q_FIRST,
    Q_IDX,
    Q_LAST,
    FloorDiv,
    FloorMod,
    H,
    Load,
    RowMax,
    RowMin,
    evaluate,
)
from support.visits import Elements, row_table, sweep

CHUNK, ANYWHERE = Int("chunk", min=1), Int("anywhere", min=-4)
DOC = Tensor("doc", ("kv_len",), "int32", sorted=True)
ENDS = Tensor("ends", ("kv_len",), "int32")
FLAG = Tensor("flag", ("kv_len",), "bool")
LOOSE = Tensor("loose", (None,), "int32", sorted=True)
BEGIN, END = RowTable("begin", DOC, DOC, "left"), RowTable("end", DOC, DOC, "right")
DECLARATIONS = Declarations.of((CHUNK, ANYWHERE, DOC, ENDS, FLAG, LOOSE), (BEGIN, END))

LENGTH = 9
IDS = {"doc": Elements([-3, -3, 0, 0, 0, 2, 7, 7, 7])}
TENSORS: dict[str, Any] = {
    **IDS,
    "ends": Elements([5, -2, 7, 7, 0, 3, 9, -1, 4]),
    "flag": Elements([True, False, False, True, True, False, False, True, False]),
    "begin": row_table(BEGIN, IDS),
    "end": row_table(END, IDS),
}
CALLS = [
    {**TENSORS, "chunk": chunk, "anywhere": anywhere, "kv_len": LENGTH}
    for chunk, anywhere in product((1, 2, 3, 7), (-4, 0, 5))
]

C, A = CHUNK.sym, ANYWHERE.sym
ELEMENTS = [Load(t.sym, Q_IDX) for t in (DOC, ENDS, FLAG, BEGIN, END)]


@st.composite
def terms(draw: st.DrawFn, depth: int = 3) -> Any:
    kinds = ["leaf", "leaf", "+", "*", "//", "%", "min", "max", "abs", "C//"]
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    if kind == "leaf":
        return draw(st.sampled_from([Q_IDX, Q_IDX, A, C, KV_LEN, sympy.Integer(3), *ELEMENTS]))
    a = draw(terms(depth=depth - 1))
    if kind == "abs":
        return sympy.Abs(a)
    if kind == "*":
        return a * draw(st.sampled_from([-2, 3, C, A]))
    if kind in ("//", "%"):
        return (FloorDiv if kind == "//" else FloorMod)(a, draw(st.sampled_from([2, 5, C])))
    if kind == "C//":
        return C * FloorDiv(a, C)
    b = draw(terms(depth=depth - 1))
    return {"+": sympy.Add, "min": sympy.Min, "max": sympy.Max}[kind](a, b)


def at(expr: Any, call: dict[str, Any], row: int) -> int:
    return int(evaluate(expr, {**call, "q_idx": row, "q_first": 2, "q_last": 6}))


@sweep(300)
@given(terms())
def test_signs_directions_and_steps_are_those_of_numbers(term: Any) -> None:
    sign, direction = DECLARATIONS.sign(term), DECLARATIONS.direction(term, Q_IDX)
    step = DECLARATIONS.step(term, Q_IDX)
    for call in CALLS:
        values = [at(term, call, row) for row in range(LENGTH)]
        assert sign is None or all(sign * value >= 0 for value in values)
        assert not DECLARATIONS.at_least(term, 1) or min(values) >= 1
        moves = [after - before for before, after in pairwise(values)]
        assert direction is None or all(direction * move >= 0 for move in moves)
        assert direction != 0 or not any(moves)
        assert step is None or max(map(abs, moves)) <= at(step, call, 0)


@sweep(300)
@given(terms(), st.sampled_from([None, Q_FIRST, RowMin, RowMax]))
def test_links_hold_for_numbers(term: Any, place: Any) -> None:
    if place is not None:
        term = place(term) if place in (RowMin, RowMax) else term.xreplace({Q_IDX: place})
    inequalities = [atom.to_sympy() for atom in axioms_of(DECLARATIONS, lambda element: True)(term)]
    for call, row in product(CALLS, range(LENGTH)):
        for inequality in inequalities:
            assert at(inequality, call, row) >= 0, (term, inequality, call, row)


def test_an_element_that_may_lie_outside_has_no_place_in_its_document() -> None:
    element = Load(BEGIN.sym, Q_IDX)
    inside, outside = (
        axioms_of(DECLARATIONS, lambda e, known=known: known) for known in (True, False)
    )
    assert len(outside(element)) < len(inside(element))


@pytest.mark.parametrize(
    ("term", "direction"),
    [
        (FloorDiv(Q_IDX - 3, C), 1),
        (-C * FloorDiv(Q_IDX, C), -1),
        (A * Q_IDX, None),
        (sympy.Min(Q_IDX, 5), 1),
        (sympy.Min(Q_IDX, -Q_IDX), None),
        (Load(DOC.sym, 2 * Q_IDX), 1),
        (Load(BEGIN.sym, -Q_IDX), -1),
        (Load(ENDS.sym, Q_IDX), None),
        (Load(LOOSE.sym, Q_IDX), None),  # of unknown size: it may end before the rows do
        (Load(ENDS.sym, H), 0),
        (Q_IDX - FloorDiv(Q_IDX, 2), None),
    ],
)
def test_directions(term: Any, direction: int | None) -> None:
    assert DECLARATIONS.direction(term, Q_IDX) == direction


@pytest.mark.parametrize(
    ("term", "step"),
    [
        (FloorDiv(Q_IDX, C), 1),
        (C * FloorDiv(Q_IDX, C), C),
        (FloorDiv(5 * Q_IDX, 2), 3),
        (sympy.Max(3, sympy.Min(FloorDiv(Q_IDX, 4), A)), 1),
        (Load(BEGIN.sym, Q_IDX), None),
    ],
)
def test_steps(term: Any, step: Any) -> None:
    assert DECLARATIONS.step(term, Q_IDX) == step


NUMERATORS = st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.integers(-30, 30))


@sweep(200)
@given(NUMERATORS, st.sampled_from([1, 2, 3, 8, C]))
def test_quotients_are_pythons(numerator: tuple[int, int, int], divisor: Any) -> None:
    a, b, const = numerator
    expr, d = a * Q_IDX + b * C + const, sympy.sympify(divisor)
    for call, row in product(CALLS[::3], range(LENGTH)):
        n, by = at(expr, call, row), at(d, call, row)
        assert at(floor_div(expr, d), call, row) == n // by
        assert at(ceil_div(expr, d), call, row) == -(-n // by)
        assert at(without_remainders(FloorMod(expr, d)), call, row) == n % by


def test_quotients_take_whole_multiples_out() -> None:
    assert floor_div(64 * H + Q_IDX + 70, sympy.Integer(64)) == H + 1 + FloorDiv(Q_IDX + 6, 64)
    assert floor_div(Q_IDX - 1, sympy.Integer(8)) == FloorDiv(Q_IDX + 7, 8) - 1
    assert floor_div(FloorDiv(Q_IDX, 4), C) == FloorDiv(Q_IDX, 4 * C)
    assert floor_div(C * A + 3 * C, C) == A + 3


def test_an_extreme_over_the_rows_of_a_tile() -> None:
    values = {**TENSORS, "q_first": 2, "q_last": 4}
    element = Load(ENDS.sym, Q_IDX)
    assert evaluate(RowMin(element), values) == 0
    assert evaluate(RowMax(element - Q_IDX), values) == 5
    assert RowMax(element).free_symbols == {ENDS.sym, Q_FIRST, Q_LAST}
    assert RowMin(Load(ENDS.sym, H)) == Load(ENDS.sym, H)


class Counted:
    """The elements 0, 3, 6, 2, 5, 1, 4, 0 ... and how many of them are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: tuple[int, ...]) -> int:
        self.reads += 1
        return 3 * index[-1] % 7


def test_an_extreme_reads_each_block_of_a_tile_once() -> None:
    """With each row read a mask of sixteen chosen blocks took twenty seconds to build."""
    tensor = Counted()
    values = {ENDS.sym.name: tensor, "q_first": 50, "q_last": 177}
    of_blocks = Load(ENDS.sym, FloorDiv(Q_IDX, 64)) - FloorDiv(Q_IDX, 32)
    rows = [3 * (i // 64) % 7 - i // 32 for i in range(50, 178)]
    assert evaluate(RowMin(of_blocks), values) == min(rows)
    assert evaluate(RowMax(of_blocks), values) == max(rows)
    assert tensor.reads == 2 * 5  # rows 50, 64, 96, 128 and 160
    shifted = Load(ENDS.sym, FloorDiv(Q_IDX + 1, 64))
    assert evaluate(RowMax(shifted), values) == max(3 * ((i + 1) // 64) % 7 for i in range(50, 178))
    assert tensor.reads == 10 + 128
