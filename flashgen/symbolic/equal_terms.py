"""Terms that a conjunction says are equal: one of them stands for both in its other parts.

Given ``ids[q] == ids[kv]``, ``q - start[ids[q]] >= kv - start[ids[kv]]`` becomes ``q >= kv``; given
``q // n == kv // n``, so does ``q % n >= kv % n``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import sympy
from sympy.core.relational import Relational

from flashgen.symbolic.affine import linearise
from flashgen.symbolic.quotients import floor_div, without_remainders
from flashgen.symbols import KV_IDX, Q_IDX, FloorDiv, Load

#: Tests for equality stay: what hides an id is part of a row table.
_ORDERS = sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt

_CHOICES = sympy.Min | sympy.Max | sympy.Abs


def simplified(expr: Any) -> Any:
    """A predicate in negation normal form, with comparisons that equal terms make affine."""
    positions = frozenset((Q_IDX, KV_IDX))
    return _replaced(expr, lambda difference: _is_affine(difference, positions), Q_IDX, Relational)


def solvable(expr: Any, tile: Any, solved: Any) -> Any:
    """A predicate with terms of the position ``tile`` for those that keep `solved` from being so.

    Given ``ids[q] == ids[kv]``, ``kv - start[ids[kv]] < n`` is ``kv < start[ids[q]] + n``.
    """
    position = frozenset((solved,))
    return _replaced(expr, lambda difference: _is_affine(difference, position), tile, _ORDERS)


def _replaced(expr: Any, accepts: Callable[[Any], bool], kept: Any, kinds: Any) -> Any:
    """A predicate in which terms of ``kept`` stand for equal ones, where that makes a comparison
    acceptable, of one of these kinds, that is not.
    """

    def visit(part: Any, pairs: tuple[tuple[Any, Any], ...]) -> Any:
        if isinstance(part, sympy.Or):
            return sympy.Or(*(visit(arg, pairs) for arg in part.args))
        if isinstance(part, sympy.And):
            found = tuple(pair for arg in part.args for pair in _pairs(arg, kept))
            inner = tuple(dict.fromkeys((*pairs, *found)))
            # A pair stays what it is: it stands for its parts.
            return sympy.And(
                *(arg if any(_pairs(arg, kept)) else visit(arg, inner) for arg in part.args)
            )
        if not isinstance(part, kinds) or accepts(part.lhs - part.rhs):
            return part
        for of, by in pairs:
            plain = part.lhs - part.rhs
            difference = without_remainders(plain) if of.has(FloorDiv) else plain
            difference = difference.xreplace({of: by})
            if accepts(difference):
                return part.func(difference, 0, evaluate=False)
        return part

    return visit(expr, ())


def _pairs(part: Any, kept: Any) -> Iterator[tuple[Any, Any]]:
    """(a term, what it equals), if a condition says so of two elements or two quotients.

    What it equals depends on the position ``kept``, and the term on the other one.
    """
    if not isinstance(part, sympy.Eq):
        return
    for one, other in permutations(part.args):
        if kept in one.free_symbols or kept not in other.free_symbols:
            continue
        if isinstance(one, Load) and isinstance(other, Load):
            yield one, other
        elif isinstance(one, FloorDiv) and isinstance(other, FloorDiv):
            # As they stand in sums: (n - 70) // 64 is (n + 58) // 64 - 2.
            whole, quotient = floor_div(*one.args).as_independent(FloorDiv, as_Add=True)
            if isinstance(quotient, FloorDiv):
                yield quotient, floor_div(*other.args) - whole


def _is_affine(expr: Any, positions: frozenset[Any]) -> bool:
    """Whether an expression is affine in positions, and so is all that it chooses from."""
    if isinstance(expr, _CHOICES):
        return all(_is_affine(arg, positions) for arg in expr.args)
    chosen = {x: sympy.Dummy() for x in expr.atoms(sympy.Min, sympy.Max, sympy.Abs)}
    outside = expr.xreplace(chosen)
    named = positions.union(chosen.values())
    return linearise(outside, named) is not None and all(
        _is_affine(x, positions) for x in chosen if chosen[x] in outside.free_symbols
    )
