"""Normalisers: how scores become weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy

from flashgen.arguments import per_head
from flashgen.decays import Decay, HeadDecay, as_decay
from flashgen.declared import Param
from flashgen.errors import MaskError
from flashgen.feature_maps import ElementMap, FeatureMap, as_feature_map, identity
from flashgen.params import Float, Tensor
from flashgen.symbols import B, H
from flashgen.tracing.calls import traced_call
from flashgen.tracing.expr import Expr
from flashgen.tracing.kinds import CONDITION

#: ``(b, h) -> logit``.
SinkMod = Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Normaliser:
    """How a row's scores become weights.

    Attributes:
        kind: ``"softmax"``: exp(score) over its sum in a row; ``"sigmoid"``: each score by itself;
            ``"linear"``: products of features, see `Linear`.
        label: the user's notation of it.
        sink: for a softmax, ``(b, h) -> logit`` of a further key whose value is 0; None: no sink.
    """

    kind: str
    label: str
    sink: SinkMod | None = None

    @cached_property
    def traced_sink(self) -> Expr | None:
        """The sink's logit for symbols b and h; None without a sink.

        Raises:
            MaskError: the function fails on symbols or does not return a finite number.
        """
        if self.sink is None:
            return None
        logit = traced_call(self.sink, (B, H), f"sink {self.label}")
        if not isinstance(logit, Expr) or logit.kind == CONDITION:
            raise MaskError(f"{self.label}: its sink is {logit!r}, not a number; return a logit")
        if logit.sym.has(sympy.oo, -sympy.oo, sympy.nan, sympy.zoo):
            raise MaskError(
                f"{self.label}: its sink may become infinite; return a finite logit, "
                "such as -1e9 for a head without a sink"
            )
        return logit

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters and constants it mentions, in the order of first use."""
        return () if self.traced_sink is None else self.traced_sink.params

    @property
    def inputs(self) -> tuple[Expr, ...]:
        """The expressions that it brings into a spec."""
        return () if self.traced_sink is None else (self.traced_sink,)

    @cached_property
    def canonical(self) -> str:
        """One string for all normalisers that compute the same, stable across processes."""
        sink = "" if self.traced_sink is None else f" sink={self.traced_sink.sym}"
        return f"{self.kind}{sink} params={[param.declaration for param in self.params]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normaliser) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return self.label


def softmax(sink: float | Float | Tensor | SinkMod | None = None) -> Normaliser:
    """Weights exp(score) / (sum of a row's exp(score), and of exp(sink)).

    A sink takes part in the sum without a value of its own, so that a row may attend to nothing:
    the learned sinks of gpt-oss (https://arxiv.org/abs/2508.10925). A row that sees no key has
    weights of 0. The log-sum-exp that ``attention`` returns includes the sink.

    Args:
        sink: a finite logit, not scaled: a number, a `Float` that the call chooses, a float
            `Tensor` of dims ``("num_q_heads",)``, ``("batch",)`` or both, or a function
            ``(b, h) -> logit``.
    """
    if sink is None:
        return Normaliser("softmax", "softmax()")
    if isinstance(sink, Tensor) and sink.is_float:
        return Normaliser(
            "softmax", f"softmax(sink={sink.name})", per_head("softmax", "sink", sink)
        )
    if isinstance(sink, Float):
        return Normaliser("softmax", f"softmax(sink={sink})", lambda b, h: sink)
    if callable(sink):
        return Normaliser("softmax", f"softmax(sink={getattr(sink, '__name__', 'sink')})", sink)
    if isinstance(sink, int | float) and not isinstance(sink, bool) and math.isfinite(sink):
        logit = float(sink)
        return Normaliser("softmax", f"softmax(sink={sink})", lambda b, h: logit)
    raise MaskError(f"softmax: sink={sink!r}; give a finite number, a Float or a Tensor of floats")


def softmax_off_by_one() -> Normaliser:
    """Weights exp(score) / (1 + sum of a row's exp(score)), which may all be near 0: a sink of 0.

    Miller 2023 (https://www.evanmiller.org/attention-is-off-by-one.html).
    """
    return Normaliser("softmax", "softmax_off_by_one()", lambda b, h: 0.0)


def sigmoid_attention() -> Normaliser:
    """Weights 1 / (1 + exp(-score)), each key by itself: they do not add up to 1.

    Ramapuram et al. 2024 (https://arxiv.org/abs/2409.04431). Its bias of -log(kv_len) is a score
    function: ``lambda score, b, h, q_idx, kv_idx: score - log(kv_len)``. The log-sum-exp that
    ``attention`` returns is the log of the sum of a row's weights: -inf for a row that sees no key,
    or whose weights are all 0 in float32, as they are for scores below -88.
    """
    return Normaliser("sigmoid", "sigmoid_attention()")


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Normaliser):
    """Weights that are products of features of q and k: see `linear`.

    Attributes:
        feature_map: what becomes of the elements of q and k.
        normalise: whether a query's weights are divided by their sum.
        algorithm: ``"linear"`` or ``"quadratic"`` to insist on one; None leaves it to flashgen.
        decay: what the sums over the keys before a key are multiplied by; None leaves them.
    """

    feature_map: FeatureMap = field(default_factory=identity)
    normalise: bool = True
    algorithm: str | None = None
    decay: Decay | None = None

    @property
    def params(self) -> tuple[Param, ...]:
        """Those of the decay and of the feature map, which is traced: its mistakes are found.

        Raises:
            MaskError: the feature map or the decay cannot be traced.
        """
        self.feature_map.check()
        return (*(() if self.decay is None else self.decay.params), *self.feature_map.matrices)

    @property
    def inputs(self) -> tuple[Expr, ...]:
        """The tensor of decays, and matrices of the feature map."""
        decay = None if self.decay is None else self.decay.tensor
        tensors = (() if decay is None else (decay,)) + self.feature_map.matrices
        return tuple(Expr(tensor.sym, (tensor,)) for tensor in tensors)

    @cached_property
    def canonical(self) -> str:
        """One string for all that compute the same: the algorithm says only how."""
        decay = "" if self.decay is None else f" decay={self.decay.canonical}"
        shown = f"linear feature_map={self.feature_map.canonical} normalise={self.normalise}"
        return f"{shown}{decay}"


def linear(
    feature_map: FeatureMap | ElementMap | tuple[ElementMap, ElementMap],
    *,
    decay: Sequence[float] | HeadDecay | Tensor | None = None,
    normalise: bool = True,
    algorithm: str | None = None,
) -> Linear:
    """Weights ``scale * features(q) @ features(k)``, divided by their sum over the keys of a query.

    Sums over keys factor into a state of features x v_head_dim, so that time is linear in the
    length, and memory for scores is none. Under masks whose sums do not, as of a window, kernels go
    over the visible pairs with the same weights. There is no exponential and no maximum. Where the
    sum of a query's weights is 0, its output is 0. With ``normalise`` the scale changes the
    log-sum-exp alone, which exists for features that cannot be negative.

    Args:
        feature_map: `identity`, `relu`, `elu_plus_one`, `softmax_features`, `favor`, or a function
            ``x -> feature`` of an element of q or k, and of sums over elements, that traces. The
            function may begin with a product with a declared float `Tensor`, ``x @ M``, of dims
            ``(head_dim, columns)``, or ``("num_kv_heads", head_dim, columns)`` for one of each
            head; it is then of the product's elements, and the tensor has a gradient. A pair of
            such functions has a matrix for q and another one for k.
        decay: logarithms, up to 0, of what a state is multiplied by before a key is added to it: a
            number for each head of k, in a tuple; a function ``h -> number`` that traces; or a
            float32 `Tensor` of dims ``("batch", "num_kv_heads", "kv_len")``, which has a gradient.
            So the weight of a key also has the factor exp(sum of the decays after it, up to the
            query's position). With the number of features as a fourth dimension each feature has
            decays of its own, and its product in a weight has their factor. -inf forgets. It needs
            a mask that shows no key behind a query's position. None is no decay.
        normalise: whether weights are divided by their sum.
        algorithm: ``"linear"`` insists on kernels that are linear in the length; ``"quadratic"`` on
            those that go over all pairs; None takes linear ones where the mask allows them.
    """
    made = as_feature_map(feature_map)
    forgets = as_decay(decay)
    shown = "" if forgets is None else f", decay={forgets.label}"
    shown += "" if normalise else ", normalise=False"
    shown += f", algorithm={algorithm!r}" if algorithm is not None else ""
    return Linear(
        "linear", f"linear({made.label}{shown})", None, made, normalise, algorithm, forgets
    )
