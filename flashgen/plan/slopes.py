"""What a score grows by with the products: the derivative, and what its form alone tells of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy

from flashgen.plan.code import finite_score
from flashgen.plan.kernel import KernelPlan
from flashgen.scores import Score
from flashgen.symbolic.gradient import score_derivative
from flashgen.symbolic.varies_over import Axes, is_integral, varies_over
from flashgen.symbols import Load


@lru_cache(maxsize=64)
def derivative(score: Score) -> Any:
    """The derivative of a score by what it is of, where it is finite."""
    return score_derivative(finite_score(score)[0])


def has_element_slopes(plan: KernelPlan) -> bool:
    """Whether the score's slope differs between elements of a tile."""
    score = plan.spec.score
    return score is not None and varies_over(derivative(score)) != Axes.SCALAR


def is_finite(expr: Any) -> bool:
    """Whether an expression is finite wherever what it is of is, by its form alone."""
    if not expr.args or isinstance(expr, Load) or is_integral(expr):
        return True
    if isinstance(expr, sympy.Pow):
        whole = bool(expr.exp.is_Integer and expr.exp > 0)
        return (
            expr.is_number or (whole and is_finite(expr.base)) or varies_over(expr) == Axes.SCALAR
        )
    if isinstance(expr, sympy.Piecewise):
        return all(is_finite(value) for value, _ in expr.args)
    plain = sympy.Add | sympy.Mul | sympy.Abs | sympy.Min | sympy.Max
    bounded = sympy.tanh | sympy.sin | sympy.cos
    return expr.is_number or (isinstance(expr, plain | bounded) and all(map(is_finite, expr.args)))
