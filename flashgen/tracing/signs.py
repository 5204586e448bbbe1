"""Whether an expression is at least 0, or 1, told by its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.symbols import KV_LEN, Q_LEN, SYMBOLS, FloorDiv, FloorMod, Load, RowMax, RowMin

#: The least values of what every mask has: indices are not negative, lengths are positive.
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
        least: the least value of a symbol, where there is one.
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
        return any(map(holds, expr.args)) and all(holds(arg, 0) for arg in expr.args)
    if isinstance(expr, sympy.Max):
        return any(map(holds, expr.args))
    if isinstance(expr, sympy.Piecewise):
        return all(holds(value) for value, _ in expr.args)
    if isinstance(expr, RowMin | RowMax):
        return holds(expr.args[0])
    if bound > 0:
        return False
    if isinstance(expr, FloorDiv):
        return holds(expr.args[0])
    if isinstance(expr, Load):
        return counts(expr)
    return isinstance(expr, FloorMod | sympy.Abs)
