"""Affine systems: elimination projects, infeasibility is decided, proofs are sound."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import given, settings

from flashgen.symbolic.affine import Affine, eliminate, linearise, symbol
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.entailment import Facts, infeasible
from flashgen.symbolic.inequalities import Reader
from flashgen.symbolic.logic import Conjunction, conjunctions, negation_normal_form
from flashgen.symbolic.trace import KEYS_OF_ROWS
from flashgen.symbols import KV_IDX, Q_IDX, FloorDiv, evaluate

X, Y, N = sympy.symbols("x y n", integer=True)
x, y, n = symbol(X), symbol(Y), symbol(N)
FREE = frozenset((X, Y))


def value(atom: Affine, point: dict[str, int]) -> int:
    return int(evaluate(atom.to_sympy(), point))


def test_affine_expressions_add_and_scale() -> None:
    expr = (x + y * 2 - 3) * 2 - x
    assert expr.coefficients == {X: 1, Y: 4}
    assert expr.const == -6
    assert expr.without(Y) == x - 6
    assert expr.substitute(Y, n - 1) == x + n * 4 - 10
    assert (x - x).terms == ()


def test_the_strongest_integer_form_rounds_towards_the_solutions() -> None:
    assert (x * 2 + y * 4 - 3).tightened() == x + y * 2 - 2
    assert (x * 2 + y * 3 - 3).tightened() == x * 2 + y * 3 - 3


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (2 * X - 3 * (Y - 1), x * 2 - y * 3 + 3),
        (N * 4 + X, n * 4 + x),
        (N**2 * 3 + X, Affine.of({N**2: 3, X: 1}, 0)),
        (FloorDiv(N, 2) + Y, Affine.of({FloorDiv(N, 2): 1, Y: 1}, 0)),
        (X + (N + 1) ** 2, Affine.of({X: 1, N**2: 1, N: 2}, 1)),
        ((X - Y) ** 2, None),
        (N * (X - Y) ** 2, None),
        (X * N, None),
        (FloorDiv(X, 2), None),
        (X / 2, None),
    ],
    ids=str,
)
def test_linearise_takes_what_is_affine(expr: object, expected: Affine | None) -> None:
    assert linearise(expr, FREE) == expected


ATOMS = st.builds(
    lambda a, b, c: Affine.of({X: a, Y: b}, c),
    st.integers(-3, 3),
    st.integers(-3, 3),
    st.integers(-9, 9),
)
SYSTEMS = st.lists(ATOMS, min_size=1, max_size=5)
BOX = [x + 6, -x + 6, y + 6, -y + 6]
POINTS = [{"x": a, "y": b} for a, b in product(range(-6, 7), repeat=2)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SYSTEMS)
def test_elimination_is_the_shadow_of_the_solutions(system: list[Affine]) -> None:
    shadow, doubts = eliminate([*system, *BOX], X)
    for b in range(-6, 7):
        inside = any(all(value(e, {"x": a, "y": b}) >= 0 for e in system) for a in range(-6, 7))
        said = all(value(e, {"y": b}) >= 0 for e in shadow)
        assert said or not inside
        if all(value(e, {"y": b}) >= 0 for e in doubts):
            assert said == inside


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SYSTEMS, ATOMS)
def test_a_proof_holds_at_every_solution(system: list[Affine], atom: Affine) -> None:
    facts = Facts((*system, *BOX))
    solutions = [p for p in POINTS if all(value(e, p) >= 0 for e in system)]
    if facts.contradictory:
        assert not solutions
    if facts.proves(atom):
        assert all(value(atom, p) >= 0 for p in solutions)
    if facts.refutes(((atom,), (atom.negated(), x - 1))):
        assert not any(value(atom, p) >= 0 and p["x"] >= 1 for p in solutions)


def test_contradictions_are_found_through_several_symbols() -> None:
    assert infeasible([x - y - 1, y - n - 1, n - x])
    assert not infeasible([x - y - 1, y - n - 1, x - n])
    assert infeasible([Affine((), -1)])
    assert not infeasible([])


def test_quotients_bring_their_own_facts() -> None:
    quotient = symbol(FloorDiv(2 * N + 1, 3))
    facts = Facts((n - 1,))
    assert facts.proves(quotient - 1)
    assert facts.proves(n - quotient)
    assert not facts.proves(quotient - 2)


def test_cases_are_refuted_one_by_one() -> None:
    facts = Facts((x, -x + 4))
    assert facts.refutes(((x - 5, -x - 1), (y,)))
    assert not facts.refutes(((x - 4, -x - 1), (y,)))
    assert not facts.refutes(((x - 5, -x - 1), (y,)), budget=1)  # given up, not refuted


def test_negation_reaches_the_comparisons() -> None:
    expr = ~((X > 1) & ((Y > 2) | ~(N > 3)))
    assert negation_normal_form(expr) == (X <= 1) | ((Y <= 2) & (N > 3))


def test_conjunctions_absorb_and_join() -> None:
    q, kv = symbol(Q_IDX), symbol(KV_IDX)
    facts, read = Facts((q, kv)), Reader(KEYS_OF_ROWS, Declarations.of(()))
    causal, near = Q_IDX >= KV_IDX, KV_IDX >= Q_IDX - 3
    assert conjunctions(causal | (causal & near), facts, read) == [Conjunction((q - kv,))]
    assert conjunctions(causal | (KV_IDX > Q_IDX), facts, read) == [Conjunction()]
    assert conjunctions(causal & (KV_IDX > Q_IDX + 2), facts, read) == []
    (both_sides,) = conjunctions(sympy.Abs(Q_IDX - KV_IDX) <= 3, facts, read)
    assert set(both_sides.atoms) == {kv - q + 3, q - kv + 3}
    odd = sympy.Eq(Q_IDX * KV_IDX, 7)
    assert conjunctions(odd & causal, facts, read) == [Conjunction((q - kv,), (odd,))]
