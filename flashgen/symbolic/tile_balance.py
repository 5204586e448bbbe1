"""Tile balance: which tiles have the most work, by the movement of their intervals' ends."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan
from typing import Any

import sympy

from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.trace import Orientation
from flashgen.symbols import FloorDiv, Load


def longest_end(
    intervals: Iterable[Interval], orientation: Orientation, declarations: Declarations
) -> str:
    """Which tiles visit the most positions: the ``"first"``, the ``"last"``, or ``"even"``."""
    ends = {orientation.first, orientation.last}
    least = most = 0.0
    for interval in intervals:
        if interval.condition.free_symbols & ends:
            return "even"
        begin, end = (_slopes(e, ends, declarations) for e in (interval.begin, interval.end))
        least += end[0] - begin[1]
        most += end[1] - begin[0]
    if least >= 0 and most > 0:
        return "last"
    return "first" if most <= 0 and least < 0 else "even"


def _slopes(expr: Any, ends: set[Any], declarations: Declarations) -> tuple[float, float]:
    """The least and the most that ``expr`` moves, on average, when the tile moves by one."""
    if not expr.free_symbols & ends:
        return 0.0, 0.0
    if expr in ends:
        return 1.0, 1.0
    if isinstance(expr, sympy.Piecewise):
        slopes = [_slopes(value, ends, declarations) for value, _ in expr.args]
        return min(low for low, _ in slopes), max(high for _, high in slopes)
    if isinstance(expr, Load):
        table = declarations.tables.get(expr.args[0])
        # If a tensor is looked up in itself, the place of the match follows the position.
        follows = table is not None and table.of_itself
        return _slopes(expr.args[-1], ends, declarations) if follows else (-inf, inf)
    if isinstance(expr, FloorDiv):
        return _scaled(_slopes(expr.args[0], ends, declarations), 1, expr.args[1])
    if expr.is_Mul:
        moving = [arg for arg in expr.args if arg.free_symbols & ends]
        factor = sympy.Mul(*(arg for arg in expr.args if arg not in moving))
        if len(moving) == 1 and isinstance(moving[0], FloorDiv):
            numerator, divisor = moving[0].args
            return _scaled(_slopes(numerator, ends, declarations), factor, divisor)
        return _scaled(_slopes(moving[0], ends, declarations), factor, 1)
    if not (expr.is_Add or isinstance(expr, sympy.Min | sympy.Max)):
        return -inf, inf
    slopes = [_slopes(arg, ends, declarations) for arg in expr.args]
    if expr.is_Add:
        return sum(low for low, _ in slopes), sum(high for _, high in slopes)
    return min(low for low, _ in slopes), max(high for _, high in slopes)


def _scaled(slopes: tuple[float, float], factor: Any, divisor: Any) -> tuple[float, float]:
    ratio = sympy.sympify(factor) / divisor
    if not ratio.is_number:
        return -inf, inf
    scaled = sorted(slope * float(ratio) for slope in slopes)
    return (-inf, inf) if any(map(isnan, scaled)) else (scaled[0], scaled[1])
