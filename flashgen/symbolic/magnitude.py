"""Bounds on the integers of a mask or a score: kernels have 32 bits for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from flashgen.symbolic.reassociate import is_small
from flashgen.symbols import (
    BATCH,
    KV_IDX,
    KV_LEN,
    Q_HEADS,
    Q_IDX,
    Q_LEN,
    SYMBOLS,
    B,
    BitAnd,
    BitOr,
    BitXor,
    FloorDiv,
    FloorMod,
    H,
    Load,
    ShiftLeft,
    ShiftRight,
)
from flashgen.tracing.signs import most

_ARITHMETIC = (sympy.Add, sympy.Mul, sympy.Pow, sympy.Abs, sympy.Min, sympy.Max, sympy.Piecewise)
#: Nodes that compute with integers as such. Elsewhere large integers are computed as floats.
_WHOLE = (
    FloorDiv, FloorMod, BitAnd, BitOr, BitXor, ShiftLeft, ShiftRight, Load,
    sympy.core.relational.Relational,
)  # fmt: skip
#: The length that bounds each index.
_BELOW = {Q_IDX: Q_LEN, KV_IDX: KV_LEN, B: BATCH, H: Q_HEADS}


def large_integers(expr: Any) -> dict[Any, Any]:
    """Parts of an expression that 32 bits may not hold, with a bound of the magnitude of each.

    Every partial sum and product of a part is within its bound, which is in terms of lengths,
    heads, batch and `Int` parameters. Elements of tensors count as 1: their values are unknown.
    """
    bounds = {part: magnitude(part) for part in _integers(expr)}
    return {part: bound for part, bound in bounds.items() if not is_small(bound)}


def _integers(expr: Any, within: Any = None) -> Iterator[Any]:
    if isinstance(expr, _ARITHMETIC) and expr.is_integer and isinstance(within, _WHOLE):
        yield expr
    if isinstance(expr, ShiftLeft):
        yield expr
    # For a sum within a sum, the outer one is computed as an integer.
    inner = within if isinstance(expr, _ARITHMETIC) and not isinstance(within, _WHOLE) else expr
    for arg in expr.args:
        yield from _integers(arg, inner)


def magnitude(expr: Any) -> Any:
    """A bound of the magnitude of an integer expression and of its parts, as a sympy expression."""
    if expr.is_Integer:
        return abs(expr)
    if expr.is_Symbol:
        return _BELOW.get(expr, expr if expr in SYMBOLS else sympy.Abs(expr))
    if isinstance(expr, sympy.Mul):
        # The product (a // d) * d is bounded by a.
        for quotient in (arg for arg in expr.args if isinstance(arg, FloorDiv)):
            rest = expr / quotient
            if quotient.args[1] in sympy.Mul.make_args(rest):
                return magnitude(quotient.args[0] * (rest / quotient.args[1]))
        return sympy.Mul(*map(magnitude, expr.args))
    if isinstance(expr, sympy.Pow):
        return magnitude(expr.base) ** magnitude(expr.exp)
    if isinstance(expr, sympy.Piecewise):
        return sympy.Max(*(magnitude(value) for value, _ in expr.args))
    if isinstance(expr, sympy.Min | sympy.Max):
        return sympy.Max(*map(magnitude, expr.args))
    if isinstance(expr, FloorDiv | ShiftRight):
        return magnitude(expr.args[0])
    if isinstance(expr, ShiftLeft):
        return ShiftLeft(magnitude(expr.args[0]), _farthest(expr.args[1]))
    if isinstance(expr, FloorMod):
        return magnitude(expr.args[1])
    if isinstance(expr, sympy.Add | sympy.Abs | BitAnd | BitOr | BitXor):
        return sympy.Add(*map(magnitude, expr.args))
    return sympy.Integer(1)


def _farthest(shift: Any) -> Any:
    """The largest shift: for an index its length less 1, since one bit more doubles it."""
    limit = most(shift)
    if limit is not None:
        return sympy.Integer(limit)
    return _BELOW[shift] - 1 if shift in _BELOW else magnitude(shift)
