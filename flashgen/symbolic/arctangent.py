"""The arctangent by a polynomial: neither Triton nor Gluon has one on every GPU."""

from __future__ import annotations

from typing import Any

import sympy

#: Coefficients of ``atan(t) / t - 1`` from 0 to 1, by powers of ``t * t``; the error is below 2e-8.
_POWERS = (
    -0.333331527, 0.199937728, -0.142110553, 0.106660046, -0.0755221409, 0.0432118583,
    -0.0163679264, 0.00292069179,
)  # fmt: skip


def with_polynomials(expr: Any) -> Any:
    """An expression with a polynomial for each arctangent, exact to a float32's last bits."""
    if not expr.has(sympy.atan):
        return expr
    found = [call for call in expr.atoms(sympy.atan) if call.free_symbols]  # others are numbers
    found.sort(key=lambda call: call.count_ops())
    for call in found:
        expr = expr.xreplace({call: _polynomial(call.args[0])})
    return expr


def _polynomial(x: Any) -> Any:
    """The arctangent of x; beyond 1 it is a right angle less the arctangent of 1 / x."""
    size = sympy.Abs(x)
    t = _choice(size > 1, 1 / sympy.Max(size, 1), size)
    square = t**2
    series = sympy.Float(_POWERS[-1])
    for power in reversed(_POWERS[:-1]):
        series = sympy.Float(power) + square * series
    near = t * (1 + square * series)
    angle = _choice(size > 1, sympy.Float(1.5707963267948966) - near, near)
    return _choice(x < 0, -angle, angle)


def _choice(when: Any, a: Any, b: Any) -> Any:
    return sympy.Piecewise((a, when), (b, True), evaluate=False)
