"""FeatureMap: what linear attention makes of the elements of q and k before it multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from flashgen.errors import MaskError
from flashgen.functions import exp, where
from flashgen.tracing.calls import traced_call
from flashgen.tracing.expr import Expr
from flashgen.tracing.kinds import CONDITION

#: An element of q or k.
ELEMENT = sympy.Symbol("x", real=True)

#: ``x -> feature``.
ElementMap = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A function of each element of q and of k; a head has as many features as elements.

    Attributes:
        function: ``x -> feature``, called with a symbol.
        label: the user's notation of it.
    """

    function: ElementMap
    label: str

    @cached_property
    def traced(self) -> Any:
        """The feature as a sympy expression over `ELEMENT`.

        Raises:
            MaskError: the function fails on a symbol, or returns no number of its element alone.
        """
        result = traced_call(self.function, (ELEMENT,), f"feature_map {self.label}")
        if not isinstance(result, Expr) or result.kind == CONDITION:
            shown = f"the condition `{result}`" if isinstance(result, Expr) else repr(result)
            raise MaskError(
                f"feature_map {self.label} returned {shown}, not a number; "
                "return a number, as where(x > 0, x, 0.0)"
            )
        if result.params:
            names = ", ".join(param.name for param in result.params)
            raise MaskError(
                f"feature_map {self.label} reads {names}, and features depend on x alone; "
                "multiply q and k by it before the call"
            )
        if result.sym.free_symbols - {ELEMENT}:
            raise MaskError(f"feature_map {self.label} reads more than x; return a function of x")
        if result.sym.has(sympy.oo, -sympy.oo, sympy.nan, sympy.zoo):
            raise MaskError(f"feature_map {self.label} may become infinite; return a finite number")
        return result.sym

    @cached_property
    def never_negative(self) -> bool:
        """Whether it is proven that no feature is negative."""
        return _never_negative(self.traced)

    @cached_property
    def canonical(self) -> str:
        """One string for all maps that compute the same, stable across processes."""
        return str(self.traced)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeatureMap) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return self.label


def _never_negative(expr: Any) -> bool:
    if not isinstance(expr, sympy.Piecewise):
        return bool(expr.is_nonnegative)
    above, below = sympy.Dummy(positive=True), sympy.Dummy(nonpositive=True)
    known = {ELEMENT > 0: above, ELEMENT <= 0: below}
    return all(
        bool(value.xreplace({ELEMENT: known.get(when, ELEMENT)}).is_nonnegative)
        for value, when in expr.args
    )


def identity() -> FeatureMap:
    """The elements themselves: weights are ``q @ k``, which may be negative."""
    return FeatureMap(lambda x: x, "identity()")


def relu() -> FeatureMap:
    """``max(x, 0)``, whose derivative at 0 is 0, as that of torch's relu."""
    return FeatureMap(lambda x: where(x > 0.0, x, 0.0), "relu()")


def elu_plus_one() -> FeatureMap:
    """``elu(x) + 1``: x + 1 above 0, exp(x) below.

    Katharopoulos et al. 2020, "Transformers are RNNs" (https://arxiv.org/abs/2006.16236).
    """
    return FeatureMap(lambda x: where(x > 0.0, x + 1.0, exp(x)), "elu_plus_one()")


def as_feature_map(value: FeatureMap | ElementMap) -> FeatureMap:
    """``value`` itself, or a bare function of an element as a `FeatureMap` of the function's name.

    Raises:
        MaskError: it is neither.
    """
    if isinstance(value, FeatureMap):
        return value
    if not callable(value):
        raise MaskError(
            f"linear: feature_map={value!r} is no feature map; "
            "write identity(), relu(), elu_plus_one(), or a function x -> feature"
        )
    name = getattr(value, "__name__", type(value).__name__)
    return FeatureMap(value, "feature_map" if name == "<lambda>" else name)
