"""FeatureMap: what linear attention makes of vectors of q and k before it multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import sympy

from flashgen.errors import MaskError
from flashgen.functions import exp, where
from flashgen.params import Tensor
from flashgen.symbols import Load, Product
from flashgen.tracing.calls import traced_call
from flashgen.tracing.expr import Expr, merged_params
from flashgen.tracing.kinds import CONDITION

#: An element of q or k.
ELEMENT = sympy.Symbol("x", real=True)

#: ``x -> feature``, or a list of features.
ElementMap = Callable[[Any], Any]


@dataclass(frozen=True)
class Sum:
    """A sum over the elements of a vector, or their largest one.

    Attributes:
        symbol: what stands for it.
        of: an expression over `ELEMENT` and the symbols of earlier sums.
        largest: whether it is the largest one, which is constant where features do not depend on
            it.
    """

    symbol: Any
    of: Any
    largest: bool


@dataclass(frozen=True)
class Features:
    """A traced map.

    Attributes:
        sums: over elements, each after those that it reads.
        pieces: expressions over `ELEMENT` and the symbols of sums: features of each element, of
            which a vector has those of the first piece first.
        matrix: what vectors are multiplied by first, so that `ELEMENT` is an element of the
            product; None for nothing.
    """

    sums: tuple[Sum, ...]
    pieces: tuple[Any, ...]
    matrix: Tensor | None = None


class _OfElements(sympy.Function):  # type: ignore[misc]
    """A number that all elements of a vector have in common."""

    nargs = 1
    is_real = True


class Total(_OfElements):
    """The sum of an expression over the elements."""


class Largest(_OfElements):
    """The largest of an expression's values."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """A function of a head's vector of q or of k: of its elements, and of sums over them.

    Attributes:
        function: ``x -> feature`` for each element, or a list of such features, which are
            concatenated; called with a symbol.
        label: the user's notation of it.
        keys: the same map with another matrix, for vectors of k; None: this one.
    """

    function: ElementMap
    label: str
    keys: FeatureMap | None = None

    @cached_property
    def traced(self) -> Features:
        """The features as sympy expressions over `ELEMENT` and the sums that they read.

        Raises:
            MaskError: the function fails on a symbol, or returns no number of its element alone.
        """
        name = f"feature_map {self.label}"
        sums: dict[Any, Sum] = {}
        results, matrix = _of_product(_results(self.function, name), name)
        pieces = tuple(self._piece(expr, sums) for expr in results)
        return Features(tuple(sums.values()), pieces, matrix)

    def __call__(self, x: Any) -> Any:
        """The features of ``x``, to build a map of others: ``relu()(x @ M)``."""
        return self.function(x)

    def _piece(self, result: Any, sums: dict[Any, Sum]) -> Any:
        """One feature of each element, with symbols for the sums in it, which ``sums`` then has."""
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
        expr = _with_symbols(result.sym, sums)
        if sums and ELEMENT not in expr.free_symbols:
            raise MaskError(
                f"feature_map {self.label} returned `{result}`, which is the same for all elements "
                "of a vector; return a feature of each element, such as x * feature_sum(x)"
            )
        return expr

    def check(self) -> None:
        """Finds mistakes.

        Raises:
            MaskError: the map cannot be traced, or is another one for keys.
        """
        features = self.traced
        if self.keys is None:
            return
        of_keys = self.keys.traced
        if (of_keys.sums, of_keys.pieces) != (features.sums, features.pieces):
            raise MaskError(
                f"feature_map {self.label}: features of q and of k differ in more than a matrix; "
                "return the same of x @ M and of x @ N"
            )
        if features.matrix is None or of_keys.matrix is None:
            raise MaskError(
                f"feature_map {self.label}: a function for q and one for k are for two matrices; "
                "write x @ M in one and x @ N in the other, or one function"
            )

    @property
    def elementwise(self) -> bool:
        """Whether each element has one feature, which depends on it alone."""
        return not self.traced.sums and len(self.traced.pieces) == 1

    @property
    def random(self) -> bool:
        """Whether features are of a random matrix, which the call passes."""
        return False

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """What vectors of q, and what those of k are multiplied by first; none for neither."""
        of_keys = self if self.keys is None else self.keys
        both = (self.traced.matrix, of_keys.traced.matrix)
        return tuple(matrix for matrix in both if matrix is not None)

    def columns(self, head_dim: int) -> int:
        """The elements of what features are made of: of a vector, or of its product."""
        sizes = [matrix.names[-1] for matrix in self.matrices]
        return int(sizes[0]) if sizes and sizes[0].isdecimal() else head_dim

    def num_features(self, head_dim: int) -> int:
        """The features of a vector."""
        return len(self.traced.pieces) * self.columns(head_dim)

    @cached_property
    def never_negative(self) -> bool:
        """Whether it is proven that no feature is negative."""
        return all(map(_never_negative, self.traced.pieces))

    @cached_property
    def canonical(self) -> str:
        """One string for all maps that compute the same, stable across processes."""
        sums, pieces = self.traced.sums, self.traced.pieces
        of_product = "".join(f" @ {matrix.declaration}" for matrix in self.matrices)
        if self.elementwise:
            return f"{pieces[0]}{of_product}"
        return f"{(*((s.symbol, s.largest, s.of) for s in sums), *pieces)}{of_product}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeatureMap) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True, eq=False, repr=False)
class Favor(FeatureMap):
    """Positive random features: see `favor`.

    Attributes:
        features: how many.
    """

    features: int = 256

    def check(self) -> None:
        """Finds mistakes.

        Raises:
            MaskError: the number of features is none that kernels have.
        """
        given = self.features
        if isinstance(given, bool) or not isinstance(given, int) or given % 8 or given < 16:
            raise MaskError(f"{self.label}: features={given!r}; write a multiple of 8 from 16 on")

    @property
    def elementwise(self) -> bool:
        """They are products of a whole vector."""
        return False

    @property
    def random(self) -> bool:
        """They are."""
        return True

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """None: the one of random features is drawn, and has no gradient."""
        return ()

    def num_features(self, head_dim: int) -> int:
        """Those that were asked for."""
        return self.features

    @cached_property
    def never_negative(self) -> bool:
        """Exponentials are not."""
        return True

    @cached_property
    def canonical(self) -> str:
        """What is computed, but for the matrix, which the call passes."""
        return f"favor({self.features})"


def _results(function: ElementMap, name: str) -> tuple[Any, ...]:
    """What a function returns for a symbol, as a tuple."""

    @wraps(function)
    def listed(x: Any) -> Any:
        result = function(x)
        return _Pieces(tuple(result)) if isinstance(result, list | tuple) else result

    result = traced_call(listed, (ELEMENT,), name)
    return result.pieces if isinstance(result, _Pieces) else (result,)


class _Pieces:
    """Several features of each element, which `traced_call` compares by their expressions."""

    def __init__(self, pieces: tuple[Any, ...]) -> None:
        self.pieces = tuple(
            Expr(sympy.sympify(x)) if isinstance(x, int | float) else x for x in pieces
        )

    @property
    def sym(self) -> Any:
        """All expressions."""
        return tuple(getattr(piece, "sym", piece) for piece in self.pieces)

    def __repr__(self) -> str:
        return repr(list(self.pieces))


def _of_product(results: tuple[Any, ...], name: str) -> tuple[tuple[Any, ...], Tensor | None]:
    """Results of a map whose first step is a product, as those of the product's elements.

    Raises:
        MaskError: a product that is not the first step.
    """
    exprs = [x for x in results if isinstance(x, Expr)]
    found = {p for x in exprs for p in x.sym.atoms(Product)}
    if not found:
        return results, None
    for product in sorted(found, key=str):
        if product.args[0] != ELEMENT:
            raise MaskError(
                f"{name} multiplies `{product.args[0]}` by {product.args[1]}, and a product comes "
                f"first; write x @ {product.args[1]}, and functions of that"
            )
    if len(found) > 1:
        names = " and by ".join(sorted(str(product.args[1]) for product in found))
        raise MaskError(
            f"{name} multiplies x by {names}; write x @ M with the columns of both in M"
        )
    [product] = found
    held = sympy.Dummy(real=True)
    if any(ELEMENT in x.sym.xreplace({product: held}).free_symbols for x in exprs):
        raise MaskError(
            f"{name} reads x besides `{product}`; write a function of `{product}` alone"
        )
    [matrix] = (p for p in merged_params(exprs) if p.name == str(product.args[1]))
    assert isinstance(matrix, Tensor)

    def of_elements(x: Any) -> Any:
        if not isinstance(x, Expr):
            return x
        others = tuple(p for p in x.params if p.name != matrix.name or x.sym.has(Load))
        return Expr(x.sym.xreplace({product: ELEMENT}), others)

    return tuple(map(of_elements, results)), matrix


def _with_symbols(expr: Any, sums: dict[Any, Sum]) -> Any:
    """The expression with a symbol for each sum over elements; inner sums come first."""
    if not expr.has(_OfElements):
        return expr
    args = [_with_symbols(arg, sums) for arg in expr.args]
    if not isinstance(expr, _OfElements):
        return expr.func(*args)
    (of,) = args
    largest = isinstance(expr, Largest)
    if (of, largest) not in sums:
        name = f"{'largest' if largest else 'sum'}_{len(sums)}"
        symbol = sympy.Symbol(name, real=True)
        if not largest and of.is_positive:
            symbol = sympy.Symbol(name, positive=True)
        elif not largest and _never_negative(of):
            symbol = sympy.Symbol(name, nonnegative=True)
        sums[of, largest] = Sum(symbol, of, largest)
    return sums[of, largest].symbol


def _never_negative(expr: Any) -> bool:
    if expr.is_Mul:
        return bool(expr.is_nonnegative) or all(map(_never_negative, expr.args))
    if not isinstance(expr, sympy.Piecewise):
        return bool(expr.is_nonnegative)
    above, below = sympy.Dummy(positive=True), sympy.Dummy(nonpositive=True)
    known = {ELEMENT > 0: above, ELEMENT <= 0: below, ELEMENT < 0: below, ELEMENT >= 0: above}
    return all(
        bool(value.xreplace({ELEMENT: known.get(when, ELEMENT)}).is_nonnegative)
        for value, when in expr.args
    )


def feature_sum(x: Any) -> Any:
    """In a feature map: the sum over the elements of a head's vector, ``feature_sum(x * x)``.

    Args:
        x: an expression of the map's argument; a tensor is summed over its last dimension.
    """
    if isinstance(x, Expr):
        return Expr(Total(x.sym), x.params)
    return x.sum(-1, keepdim=True)


def _largest(x: Any) -> Any:
    """The largest element, for maps that do not depend on it: its derivative is left out."""
    if isinstance(x, Expr):
        return Expr(Largest(x.sym), x.params)
    return x.amax(-1, keepdim=True)


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


def softmax_features() -> FeatureMap:
    """The softmax over a vector's elements: positive features that add up to 1.

    Shen et al. 2018, "Efficient Attention" (https://arxiv.org/abs/1812.01243).
    """

    def features(x: Any) -> Any:
        powers = exp(x - _largest(x))
        return powers / feature_sum(powers)

    return FeatureMap(features, "softmax_features()")


def favor(features: int = 256) -> Favor:
    """Performer's positive random features, an estimate of the softmax's weights.

    Features are ``exp(w @ x - |x|**2 / 2)``, for the rows w of a matrix of the call, orthogonal in
    blocks, which ``module.draw_features(seed)`` draws; x is q or k times the square root of the
    scale. The mean of their products is ``exp(scale * q @ k)``; more features vary less around it.

    Choromanski et al. 2020, "Rethinking Attention with Performers"
    (https://arxiv.org/abs/2009.14794).

    Args:
        features: how many: a multiple of 8 from 16 to 128, or a multiple of 128 up to 1,024.
    """
    return Favor(_unmapped, f"favor(features={features})", features=features)


def _unmapped(x: Any) -> Any:
    raise TypeError("favor's features are of a whole vector and a matrix, not of an element")


def as_feature_map(value: Any) -> FeatureMap:
    """``value`` itself, or a bare function of an element as a `FeatureMap` of the function's name.

    Of two, the first is for q and the second for k.

    Raises:
        MaskError: it is neither.
    """
    if isinstance(value, FeatureMap):
        return value
    if isinstance(value, list | tuple) and len(value) == 2:
        of_q, of_k = map(as_feature_map, value)
        return replace(of_q, label=f"({of_q.label}, {of_k.label})", keys=of_k)
    if not callable(value):
        raise MaskError(
            f"linear: feature_map={value!r} is no feature map; "
            "write identity(), relu(), elu_plus_one(), softmax_features(), favor(), "
            "a function x -> feature, or a pair of them for q and k"
        )
    name = getattr(value, "__name__", type(value).__name__)
    return FeatureMap(value, "feature_map" if name == "<lambda>" else name)
