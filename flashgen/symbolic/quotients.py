"""Integer quotients in their simplest form."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.affine import summands
from flashgen.symbols import FloorDiv, FloorMod, Load


def floor_div(numerator: Any, divisor: Any) -> Any:
    """``numerator // divisor`` for a positive divisor, with whole multiples of it taken out.

    ``(64 * h + q_idx + 70) // 64`` is ``h + (q_idx + 6) // 64 + 1``.
    """
    parts = list(summands(sympy.sympify(numerator)))
    whole = [part / divisor for part in parts if _is_whole(part / divisor)]
    remainder = sympy.Add(*(part for part in parts if not _is_whole(part / divisor)))
    if divisor.is_Integer:
        const = remainder.as_coeff_Add()[0]
        turns = sympy.floor(const / divisor)
        whole.append(turns)
        remainder -= turns * divisor
    if isinstance(remainder, FloorDiv):  # n // a // b
        remainder, divisor = remainder.args[0], remainder.args[1] * divisor
    if remainder == 0:
        return sympy.Add(*whole)
    return sympy.Add(*whole, FloorDiv(remainder, divisor))


def _is_whole(quotient: Any) -> bool:
    return bool(quotient.is_integer and quotient.as_coeff_Mul()[0].is_Integer)


def ceil_div(numerator: Any, divisor: Any) -> Any:
    """``numerator / divisor`` rounded up, for a positive divisor."""
    return floor_div(numerator + divisor - 1, divisor)


def without_remainders(expr: Any) -> Any:
    """Every ``n % d`` as ``n - d * (n // d)`` and every quotient simplified, except in indices."""
    if not expr.args or isinstance(expr, Load):
        return expr
    args = [without_remainders(arg) for arg in expr.args]
    if isinstance(expr, FloorMod):
        return args[0] - args[1] * floor_div(*args)
    if isinstance(expr, FloorDiv):
        return floor_div(*args)
    return expr if tuple(args) == expr.args else expr.func(*args)
