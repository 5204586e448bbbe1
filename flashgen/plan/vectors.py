"""VectorProgram: the lines of a feature map that reads whole vectors, and of its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.feature_maps import ELEMENT, Features
from flashgen.symbolic.gradient import derivative
from flashgen.symbolic.printer import plain_source, torch_source, triton_source
from flashgen.symbols import SCORE

LOG2_E = sympy.Float(math.log2(math.e))


@dataclass(frozen=True)
class SumLine:
    """A sum over elements, or the largest one.

    Attributes:
        name: of the variable.
        of: what is summed, as a kernel has it.
        of_torch: the same in eager torch.
        largest: whether it is the largest one.
    """

    name: str
    of: str
    of_torch: str
    largest: bool


@dataclass(frozen=True)
class SumGradient:
    """How the gradient of a sum reaches the elements and the sums that it reads.

    Attributes:
        name: of the sum's gradient.
        terms: what it adds up over the elements, as a kernel has it.
        slope: the derivative of what is summed by the element.
    """

    name: str
    terms: str
    slope: str


@dataclass(frozen=True)
class VectorProgram:
    """A map of vectors, as kernels compute it over tiles whose rows are vectors.

    Attributes:
        features: the traced map.
    """

    features: Features

    @property
    def sums(self) -> tuple[SumLine, ...]:
        """The sums, in order."""
        return tuple(
            SumLine(s.symbol.name, triton_of_element(s.of), torch_of_element(s.of), s.largest)
            for s in self.features.sums
        )

    @property
    def pieces(self) -> tuple[str, ...]:
        """The features of each piece in a kernel."""
        return tuple(map(triton_of_element, self.features.pieces))

    @property
    def pieces_torch(self) -> tuple[str, ...]:
        """The same in eager torch."""
        return tuple(map(torch_of_element, self.features.pieces))

    @property
    def slopes(self) -> tuple[str, ...]:
        """The derivative of each piece by the element, sums held fixed."""
        return tuple(
            triton_of_element(derivative(piece, ELEMENT)) for piece in self.features.pieces
        )

    @property
    def gradients(self) -> tuple[SumGradient, ...]:
        """The gradients of sums, the last one first; that of a largest element is left out.

        ``grad_0``, ``grad_1`` and so on are the gradients of pieces.
        """
        found = []
        for i, s in reversed(tuple(enumerate(self.features.sums))):
            if s.largest:
                continue
            parts = [
                _times(f"grad_{n}", derivative(piece, s.symbol))
                for n, piece in enumerate(self.features.pieces)
            ] + [
                _times(f"grad_{later.symbol.name}", derivative(later.of, s.symbol))
                for later in self.features.sums[i + 1 :]
                if not later.largest
            ]
            terms = " + ".join(part for part in parts if part)
            slope = triton_of_element(derivative(s.of, ELEMENT))
            found.append(SumGradient(f"grad_{s.symbol.name}", terms or "0.0 * x", slope))
        return tuple(found)

    @property
    def comment(self) -> str:
        """The features for a reader."""
        made = [
            f"{s.symbol.name} = {'the largest' if s.largest else 'the sum'} of {plain_source(s.of)}"
            for s in self.features.sums
        ]
        shown = ", ".join(map(plain_source, self.features.pieces))
        shown = f"[{shown}]" if len(self.features.pieces) > 1 else shown
        return f"{shown} with {', '.join(made)}" if made else shown


def triton_of_element(expr: Any) -> str:
    """The text in a kernel, of the variable x. A GPU computes exp by exp2."""
    expr = expr.replace(sympy.exp, lambda x: sympy.Pow(2, LOG2_E * x))
    return triton_source(expr.xreplace({ELEMENT: SCORE}), {"score": "x"}, tensors=_sums_in(expr))


def torch_of_element(expr: Any) -> str:
    """The text in eager torch, of the variable x."""
    return torch_source(expr.xreplace({ELEMENT: SCORE}), {"score": "x"}, _sums_in(expr))


def _sums_in(expr: Any) -> frozenset[str]:
    return frozenset(symbol.name for symbol in expr.free_symbols - {ELEMENT})


def _times(gradient: str, slope: Any) -> str:
    """The product's text; empty for a slope of 0."""
    return "" if slope == 0 else f"{gradient} * ({triton_of_element(slope)})"
