"""Derivatives of a score function: by its score, and by the elements of tensors that it reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.reassociate import is_condition
from flashgen.symbols import SCORE, Floor, Load, Truncate


@dataclass(frozen=True)
class ElementDerivative:
    """The derivative of a score by an element of a tensor.

    Attributes:
        element: the `Load` of the element.
        partial: the derivative, over the same symbols as the score.
    """

    element: Any
    partial: Any

    @property
    def tensor(self) -> str:
        """The tensor's name."""
        return str(self.element.args[0])

    @property
    def indices(self) -> tuple[Any, ...]:
        """The indices of the element."""
        return tuple(self.element.args[1:])


class _Logistic(sympy.Function):  # type: ignore[misc]
    """``1 / (1 + exp(-x))``, whose derivative as written could be infinity over infinity."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        """The derivative in a form that is finite for large x."""
        return self * (1 - self)


def score_derivative(score: Any) -> Any:
    """The derivative of a score function by the score.

    Args:
        score: an expression over `SCORE`, the indices and parameters, without infinities.
    """
    return derivative(score, SCORE)


def element_derivatives(score: Any, tensors: Collection[str]) -> tuple[ElementDerivative, ...]:
    """The derivatives of a score by every element of these tensors that it depends on.

    Elements inside an index have no derivative: they choose, and are not part of the value.
    """
    loads = sorted(_values(score), key=str)
    found = (
        ElementDerivative(load, derivative(score, load))
        for load in loads
        if str(load.args[0]) in tensors
    )
    return tuple(element for element in found if element.partial != 0)


def derivative(expr: Any, variable: Any) -> Any:
    """The derivative of expr by a variable; for a choice, of the branch that is taken.

    A value truncated or rounded to an integer is constant except for jumps. As in torch, a value
    that equals the limit of a clamp keeps its slope, and |x| has the slope 0 at 0. A branch without
    a slope, as that of log(0), which hides its key, has the slope 0: the key has no influence.

    Args:
        expr: an expression of flashgen's vocabulary.
        variable: a symbol, or a node that stands for one, such as a `Load`.
    """
    x = sympy.Dummy("x", real=True)
    held: dict[Any, Any] = {}

    def constant(node: Any) -> Any:
        return held.setdefault(node, sympy.Dummy("c", real=None if is_condition(node) else True))

    def smooth(node: Any) -> Any:
        """The node with x for the variable, and symbols for parts that do not depend on it."""
        if node == variable:
            return x
        if not _holds(node, variable) or isinstance(node, Truncate | Floor):
            return node if node.is_number else constant(node)
        if isinstance(node, sympy.Piecewise):
            branches = [(smooth(value), _when(when, constant)) for value, when in node.args]
            return sympy.Piecewise(*branches, evaluate=False)
        if isinstance(node, sympy.Abs):
            (inner,) = node.args
            signs = [(1, inner > 0), (-1, inner < 0), (0, True)]
            branches = [(n * smooth(inner), _when(sympy.sympify(w), constant)) for n, w in signs]
            return sympy.Piecewise(*branches, evaluate=False)
        if isinstance(node, sympy.Min | sympy.Max):
            return smooth(_as_choice(node, variable))
        if node.is_Pow and node.exp.is_Integer and node.exp < 0:
            power = node.base - 1
            if isinstance(power, sympy.exp):
                return _Logistic(-smooth(power.args[0])) ** -node.exp
        return node.func(*map(smooth, node.args))

    slope = sympy.diff(smooth(expr), x).replace(_Logistic, lambda u: 1 / (1 + sympy.exp(-u)))
    meant = {symbol: node for node, symbol in held.items()} | {x: variable}
    return slope.xreplace(meant | {sympy.zoo: sympy.S.Zero, sympy.nan: sympy.S.Zero})


def _values(expr: Any) -> set[Any]:
    """The elements of tensors in an expression, except those in indices and conditions."""
    if isinstance(expr, Load):
        return {expr}
    if isinstance(expr, sympy.Piecewise):
        return set().union(*(_values(value) for value, _ in expr.args))
    return set().union(*map(_values, expr.args))


def _holds(node: Any, variable: Any) -> bool:
    return bool(node.has(variable))


def _when(condition: Any, constant: Any) -> Any:
    return condition if condition in (sympy.true, sympy.false) else constant(condition)


def _as_choice(extreme: Any, variable: Any) -> Any:
    """A minimum or maximum as a choice; among equals, the part that depends on the variable."""
    first, *rest = sorted(extreme.args, key=lambda arg: not _holds(arg, variable))
    other = rest[0] if len(rest) == 1 else extreme.func(*rest)
    relation = sympy.Le if isinstance(extreme, sympy.Min) else sympy.Ge
    when = relation(first, other, evaluate=False)
    return sympy.Piecewise((first, when), (other, True), evaluate=False)
