"""The axes that an expression varies over, and whether it is an integer, for hoisting."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.symbols import (
    KV_IDX,
    Q_IDX,
    SCORE,
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
    Truncate,
)

#: The raw product q·k of a query and a key, before the softmax scale: the kernel's `scores`.
SCORES = sympy.Symbol("scores", real=True)
#: The softmax scale, an argument of the kernel.
SCALE = sympy.Symbol("scale", positive=True)


#: The distance from a query to a key, kv_idx - q_idx, where terms of it are computed once for each.
DISTANCE = sympy.Symbol("kv_minus_q", integer=True)


class OfDistance(sympy.Symbol):  # type: ignore[misc]
    """A term of the score that depends on the distance, for all pairs of a tile."""


class ToFloat(sympy.Function):  # type: ignore[misc]
    """An integer as a float32, converted where hoisting places it."""

    nargs = 1
    is_real = True


class Axes(enum.IntFlag):
    """The axes of a tile that a value varies over."""

    SCALAR = 0
    ROW = 1
    COLUMN = 2
    ELEMENT = 3


_INDICES = {
    Q_IDX: Axes.ROW,
    KV_IDX: Axes.COLUMN,
    SCORE: Axes.ELEMENT,
    SCORES: Axes.ELEMENT,
    DISTANCE: Axes.ELEMENT,
}
#: Reductions over the rows of a tile: one value, whatever its argument is.
REDUCTIONS = (RowMin, RowMax)
_WHOLE = (FloorDiv, FloorMod, BitAnd, BitOr, BitXor, ShiftLeft, ShiftRight, Truncate)
_WHOLE_OF_WHOLE = (sympy.Add, sympy.Mul, sympy.Min, sympy.Max, sympy.Abs, *REDUCTIONS)


def varies_over(expr: Any, known: Mapping[Any, Axes] | None = None) -> Axes:
    """The axes that ``expr`` varies over.

    Args:
        expr: an expression or a condition.
        known: the axes of symbols, besides the indices and the score.
    """
    if isinstance(expr, OfDistance):
        return Axes.ELEMENT
    if expr.is_Symbol:
        return _INDICES.get(expr) or (known or {}).get(expr, Axes.SCALAR)
    axes = Axes.SCALAR
    for arg in expr.args:
        axes |= varies_over(arg, known)
    return axes & ~Axes.ROW if isinstance(expr, REDUCTIONS) else axes


def is_integral(expr: Any) -> bool:
    """Whether ``expr`` is computed in integers: a statement about its nodes, not about its value.

    ``q_idx / 2 + q_idx / 2`` is not.
    """
    if expr.is_Symbol or isinstance(expr, Load):
        return bool(expr.is_integer)
    if expr.is_Integer or isinstance(expr, _WHOLE):
        return True
    if isinstance(expr, sympy.Piecewise):
        return all(is_integral(value) for value, _ in expr.args)
    if isinstance(expr, sympy.Pow):
        return bool(expr.exp.is_Integer and expr.exp > 0) and is_integral(expr.base)
    return isinstance(expr, _WHOLE_OF_WHOLE) and all(map(is_integral, expr.args))


def is_of_one_type(expr: Any) -> bool:
    """Whether an expression adds and multiplies, and converts nothing to float32."""
    if not expr.args:
        return True
    if isinstance(expr, sympy.Pow):
        return bool(expr.exp.is_Integer and expr.exp > 0) and is_of_one_type(expr.base)
    parts = expr.args if is_integral(expr) else [x for x in expr.args if not x.is_Integer]
    alike = is_integral(expr) or not any(map(is_integral, parts))
    return isinstance(expr, sympy.Add | sympy.Mul) and alike and all(map(is_of_one_type, parts))
