"""Gradients of a score: by the product of a query and a key, and by the tensors that it reads.

An input gradient, of an element of such a tensor, is a sum over the pairs that read the element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import sympy

from flashgen.config import BackwardKernel
from flashgen.plan.arguments import argument
from flashgen.plan.code import finite_score
from flashgen.plan.kernel import KernelPlan
from flashgen.scores import Score
from flashgen.spec import AttentionSpec
from flashgen.symbolic.affine import linearise
from flashgen.symbolic.by_distance import by_distance
from flashgen.symbolic.gradient import ElementDerivative, element_derivatives, score_derivative
from flashgen.symbolic.printer import torch_code
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbolic.varies_over import Axes, is_integral, varies_over
from flashgen.symbols import KV_IDX, Q_IDX, B, Floor, H, Load, Truncate

#: The difference between elements of one head: none, their query, key or distance, or both.
Over = Literal["heads", "rows", "columns", "diagonals", "elements"]

#: The launcher's name of the distance from a query to a key.
DISTANCE = "kv_minus_q"

_AXES: dict[Axes, Over] = {
    Axes.SCALAR: "heads",
    Axes.ROW: "rows",
    Axes.COLUMN: "columns",
}
_PAIR = frozenset({B, H, Q_IDX, KV_IDX})


@dataclass(frozen=True)
class InputGradient:
    """The gradient of a tensor's element, for a kernel and its launcher.

    Except for ``"elements"``, each program has separate memory for its sums, and the launcher adds
    them to the elements: no two programs add to the same memory.

    Attributes:
        tensor: the tensor's name.
        variable: the variable of the sum.
        over: the index of separate sums within a head: ``"heads"`` for none, ``"rows"`` for the
            query, ``"columns"`` for the key, ``"diagonals"`` for the distance. With ``"elements"``
            the kernel computes the element of each pair.
        once: no two pairs share an element.
        indices: the element, for the kernel: with ``"elements"``, and of packed sequences.
        launched: the element, for the launcher; otherwise.
        partial: the score's derivative by the element; None if it is 1.
    """

    tensor: str
    variable: str
    over: Over
    once: bool
    indices: tuple[Code, ...]
    launched: tuple[Code, ...]
    partial: Code | None

    @property
    def torch_indices(self) -> tuple[str, ...]:
        """The element's indices, as text for the launcher."""
        return tuple(index.text() for index in self.launched)

    @property
    def launcher_reads(self) -> frozenset[str]:
        """The names in that text."""
        return read_by(self.launched) | ({"dtype"} if any(map(_converts, self.launched)) else set())


@dataclass(frozen=True)
class InputElement:
    """An element of a float tensor that the score reads.

    Attributes:
        derivative: the score's derivative by the element.
        variable: the variable of the sum.
        addressed: whether the kernel finds the element whatever the sum is over, and adds to it.
    """

    derivative: ElementDerivative
    variable: str
    addressed: bool = False

    @cached_property
    def over(self) -> Over:
        """The index of separate sums; cached, since each candidate of the tuner needs it."""
        over = sum_over(self.derivative.indices)
        return "elements" if self.addressed and over == "diagonals" else over

    @property
    def kernel(self) -> BackwardKernel:
        """The kernel that sums it: elements of a key belong to the kernel over tiles of keys."""
        return "keys" if self.over == "columns" else "queries"

    @property
    def by_kernel(self) -> tuple[Any, ...]:
        """The kernel's expressions: the element's indices, and the derivative by the element."""
        partial = self.derivative.partial
        indices = self.derivative.indices if self._finds_element else ()
        return (*indices, *(() if partial == 1 else (partial,)))

    @property
    def _finds_element(self) -> bool:
        return self.addressed or self.over == "elements"

    def with_code(self, by_kernel: Sequence[Code]) -> InputGradient:
        """The input gradient with the code of these expressions."""
        indices = self.derivative.indices
        count = len(indices) if self._finds_element else 0
        launched = () if count else tuple(map(_launched, indices))
        return InputGradient(
            tensor=self.derivative.tensor,
            variable=self.variable,
            over=self.over,
            once=self.over == "elements" and is_one_to_one(indices),
            indices=tuple(by_kernel[:count]),
            launched=launched,
            partial=next(iter(by_kernel[count:]), None),
        )


def input_elements(plan: KernelPlan) -> tuple[InputElement, ...]:
    """The elements of float tensors on which the score depends."""
    if plan.spec.score is None:
        return ()
    return _input_elements(plan.spec.score, frozenset(_float_tensors(plan)))


def inputs_of_sink(plan: KernelPlan) -> tuple[str, ...]:
    """Tensors on which the sink's logit depends, in the arguments' order."""
    sink = plan.spec.normaliser.traced_sink
    if sink is None:
        return ()
    names = _float_tensors(plan)
    found = {derivative.tensor for derivative in element_derivatives(sink.sym, names)}
    return tuple(name for name in names if name in found)


def meeting_tensors(spec: AttentionSpec) -> tuple[str, ...]:
    """Tensors whose gradients several programs add to the same element, in any order."""
    if spec.score is None:
        return ()
    names = frozenset(param.name for param in spec.params if argument(param).is_float_tensor)
    meeting = [
        element.derivative.tensor
        for element in _input_elements(spec.score, names)
        if element.over == "elements" and not is_one_to_one(element.derivative.indices)
    ]
    return tuple(dict.fromkeys(meeting))


def sum_over(indices: Sequence[Any]) -> Over:
    """The index of separate sums, for an element with these indices."""
    axes = Axes.SCALAR
    for index in indices:
        axes |= varies_over(index)
    if axes in _AXES:
        return _AXES[axes]
    return "diagonals" if None not in map(by_distance, indices) else "elements"


def is_one_to_one(indices: Sequence[Any]) -> bool:
    """Whether no two pairs of any batch entry and head read the same element.

    This is known if each of b, h, q_idx and kv_idx is a separate index, shifted or scaled.
    """
    found: set[Any] = set()
    for index in indices:
        affine = linearise(index, _PAIR)
        moving = _PAIR & {term for term, _ in affine.terms} if affine else ()
        found |= set(moving) if len(moving) == 1 else set()
    return found == _PAIR


def _float_tensors(plan: KernelPlan) -> tuple[str, ...]:
    return tuple(argument.name for argument in plan.arguments if argument.is_float_tensor)


@lru_cache(maxsize=256)
def _input_elements(score: Score, names: frozenset[str]) -> tuple[InputElement, ...]:
    found = element_derivatives(finite_score(score)[0], names)
    variables = (f"total_{i}" if len(found) > 1 else "total" for i in range(len(found)))
    return tuple(map(InputElement, found, variables))


def _launched(index: Any) -> Code:
    distance = by_distance(index) if varies_over(index) == Axes.ELEMENT else None
    return torch_code(index) if distance is None else torch_code(distance, {"kv_idx": DISTANCE})


def _converts(code: Code) -> bool:
    """Whether torch computes it in a dtype on the way to an integer."""
    return any(map(code.printer.is_tensor, code.expr.atoms(Truncate)))


# The derivative by the product of a query and a key.


@lru_cache(maxsize=64)
def derivative(score: Score) -> Any:
    """The derivative of a score by the scaled product, where it is finite."""
    return score_derivative(finite_score(score)[0])


def has_element_gradients(plan: KernelPlan) -> bool:
    """Whether the score's derivative differs between elements of a tile."""
    score = plan.spec.score
    return score is not None and varies_over(derivative(score)) != Axes.SCALAR


def is_finite(expr: Any) -> bool:
    """Whether an expression is finite wherever its arguments are, by its form alone."""
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
    bounded = sympy.tanh | sympy.sin | sympy.cos | sympy.erf | sympy.atan | Floor
    return expr.is_number or (isinstance(expr, plain | bounded) and all(map(is_finite, expr.args)))
