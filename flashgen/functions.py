"""Functions for masks and scores, by torch's names: a spec that uses them need not import torch."""

from __future__ import annotations

from typing import Any

from flashgen.tracing.expr import apply
from flashgen.tracing.torch_names import call


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``."""
    return apply("where", condition, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers."""
    return apply("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers."""
    return apply("maximum", a, b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """``x``, but not below ``low`` nor above ``high``."""
    return apply("minimum", apply("maximum", x, low), high)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent. 16-bit kernels take the GPU's approximation where it has one."""
    return apply("tanh", x)


def exp(x: Any) -> Any:
    """E to the power of ``x``."""
    return apply("exp", x)


def exp2(x: Any) -> Any:
    """2 to the power of ``x``."""
    return apply("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return apply("log", x)


def log2(x: Any) -> Any:
    """Logarithm of base 2."""
    return apply("log2", x)


def sqrt(x: Any) -> Any:
    """Square root."""
    return apply("sqrt", x)


def sin(x: Any) -> Any:
    """Sine of an angle in radians."""
    return apply("sin", x)


def cos(x: Any) -> Any:
    """Cosine of an angle in radians."""
    return apply("cos", x)


def erf(x: Any) -> Any:
    """The error function."""
    return apply("erf", x)


def atan(x: Any) -> Any:
    """The angle, in radians, whose tangent is ``x``; kernels have a polynomial for it."""
    return apply("atan", x)


def floor(x: Any) -> Any:
    """``x`` rounded down; of a quotient of whole numbers an integer."""
    return apply("floor", x)


def gelu(x: Any, approximate: str = "none") -> Any:
    """``x`` times the normal distribution's share below it; ``"tanh"`` is near that."""
    return call("gelu", apply, (x,), {"approximate": approximate})


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    return apply("sigmoid", x)


def truncate(x: Any) -> Any:
    """The whole part of a number, towards zero, as an integer."""
    return apply("truncate", x)
