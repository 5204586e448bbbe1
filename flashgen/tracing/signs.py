"""Bounds of an expression by its form: whether it is at least 0 or 1, and its greatest value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.symbols import (
    KV_LEN,
    Q_LEN,
    SYMBOLS,
    BitAnd,
    BitOr,
    BitXor,
    FloorDiv,
    FloorMod,
    Load,
    RowMax,
    RowMin,
    ShiftLeft,
    ShiftRight,
)

#: The least values of the symbols of every mask: indices are >= 0, lengths >= 1.
LEAST: Mapping[Any, int] = {**dict.fromkeys(SYMBOLS, 0), Q_LEN: 1, KV_LEN: 1}


def at_least(
    expr: Any,
    bound: int,
    least: Mapping[Any, int],
    counts: Callable[[Any], bool] = lambda load: False,
) -> bool:
    """Whether ``expr >= bound``, for a bound of 0 or 1. False: unknown.

    Args:
        expr: a sympy expression.
        bound: 0 or 1.
        least: the least value of each symbol that has one.
        counts: whether an element, a `Load`, is known not to be negative.
    """

    def holds(arg: Any, bound: int = bound) -> bool:
        return at_least(arg, bound, least, counts)

    if expr.is_Number:
        return bool(expr >= bound)
    if expr.is_Symbol:
        return least.get(expr, bound - 1) >= bound
    if expr.is_Mul or isinstance(expr, sympy.Min):
        return all(map(holds, expr.args))
    if expr.is_Pow:
        return bool(expr.exp.is_Integer and expr.exp > 0) and holds(expr.base)
    if expr.is_Add:
        if any(map(holds, expr.args)) and all(holds(arg, 0) for arg in expr.args):
            return True
        largest = most(-expr)  # as in 7 - kv_idx % 8
        return largest is not None and -largest >= bound
    if isinstance(expr, sympy.Max):
        return any(map(holds, expr.args))
    if isinstance(expr, sympy.Piecewise):
        return all(holds(value) for value, _ in expr.args)
    if isinstance(expr, RowMin | RowMax):
        return holds(expr.args[0])
    if isinstance(expr, ShiftLeft):
        return holds(expr.args[0])
    if bound > 0:
        return False
    if isinstance(expr, BitAnd):
        return any(map(holds, expr.args))
    if isinstance(expr, BitOr | BitXor):
        return all(map(holds, expr.args))
    if isinstance(expr, FloorDiv | ShiftRight):
        return holds(expr.args[0])
    if isinstance(expr, Load):
        return counts(expr)
    return isinstance(expr, FloorMod | sympy.Abs)


def most(expr: Any) -> int | None:
    """A bound that an integer never exceeds, by its form alone. None: unknown."""
    if expr.is_Integer:
        return int(expr)
    if isinstance(expr, FloorMod):
        return int(expr.args[1]) - 1 if expr.args[1].is_Integer else None
    known = [limit for limit in map(most, expr.args) if limit is not None]
    every = len(known) == len(expr.args) > 0
    if isinstance(expr, BitAnd):
        return min((limit for limit in map(_bits, expr.args) if limit is not None), default=None)
    if isinstance(expr, sympy.Min):
        return min(known, default=None)
    if isinstance(expr, sympy.Max):
        return max(known) if every else None
    return sum(known) if expr.is_Add and every else None


def _bits(expr: Any) -> int | None:
    """The number if it is >= 0: it bounds ``&`` with any other operand."""
    return int(expr) if expr.is_Integer and expr >= 0 else None
