"""Which algorithm linear attention has, and the spec of kernels that go over all of its pairs.

Sums over keys factor for few masks. For any other one, and where the spec says so, the dense
kernels have the features of q and k as their operands, and multiply in place of exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy

from flashgen.constants import Constant
from flashgen.feature_maps import FeatureMap
from flashgen.masks import causal
from flashgen.normalisers import Linear, Normaliser
from flashgen.params import Tensor
from flashgen.plan.pair_decays import decayed
from flashgen.plan.runs import CAUSAL, runs_of
from flashgen.spec import AttentionSpec
from flashgen.symbolic.trace import trace

#: The masks whose sums over keys factor: causal and full; those of runs besides.
LINEAR_MASKS = (CAUSAL, sympy.true)

#: How linear attention can be computed.
ALGORITHMS = ("linear", "quadratic")


@dataclass(frozen=True, eq=False, repr=False)
class Products(Normaliser):
    """Weights that are products of the tensors that kernels get: features of q and k.

    Attributes:
        of: what the user declared.
        vector_dim: elements of a head's query and key, of which features are made.
    """

    of: Linear = field(kw_only=True)
    vector_dim: int = field(kw_only=True)

    @property
    def feature_map(self) -> FeatureMap:
        """What becomes of the vectors of q and k."""
        return self.of.feature_map

    @cached_property
    def canonical(self) -> str:
        """One string for all that compute the same."""
        return f"{self.of.canonical} of {self.vector_dim} by pairs"


def has_runs(spec: AttentionSpec, traced: Any) -> bool:
    """Whether a mask has runs, by ids of which the call passes one for each position."""
    runs = runs_of(traced)
    if runs is None or not runs.of_ids:
        return runs is not None
    [ids] = (p for p in spec.mask.params if isinstance(p, Tensor) and p.sym == runs.tensor)
    return not isinstance(ids, Constant) and ids.names[-1] in ("q_len", "kv_len")


def why_not_linear(spec: AttentionSpec, traced: Any) -> str:
    """Why kernels that are linear in the length cannot compute a spec; ``""`` where they can.

    Args:
        spec: a spec of linear attention.
        traced: its mask's expression.
    """
    if spec.align is not None and traced != sympy.true:
        return "a state has keys in the order of as many queries, and align allows other lengths"
    if traced not in LINEAR_MASKS and not has_runs(spec, traced):
        return "sums over the keys that the mask shows do not factor"
    return ""


def goes_over_pairs(spec: AttentionSpec, traced: Any) -> bool:
    """Whether a spec of linear attention has kernels over all pairs.

    Args:
        spec: the spec.
        traced: its mask's expression.
    """
    assert isinstance(spec.normaliser, Linear)
    algorithm = spec.normaliser.algorithm
    return algorithm == "quadratic" or (algorithm is None and bool(why_not_linear(spec, traced)))


def is_quadratic(spec: AttentionSpec) -> bool:
    """Whether a valid spec is of linear attention that goes over all pairs."""
    linear = isinstance(spec.normaliser, Linear)
    return linear and goes_over_pairs(spec, trace(spec.mask).expr)


def shows_later_keys(spec: AttentionSpec, traced: Any) -> bool:
    """Whether a mask may show keys behind a query's own position: nothing proves that it does not.

    Args:
        spec: the spec.
        traced: its mask's expression.
    """
    earlier = causal() if spec.align is None else causal().aligned(spec.align)
    return bool(trace(spec.mask & earlier).expr != traced)


def is_linear(spec: AttentionSpec) -> bool:
    """Whether a valid spec has kernels that are linear in the length, and visit no scores."""
    return isinstance(spec.normaliser, Linear) and not is_quadratic(spec)


def over_pairs(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the dense kernels: of features in place of q and k.

    Args:
        spec: one that `is_quadratic`.
    """
    of = spec.normaliser
    assert isinstance(of, Linear)
    dim = spec.qk_head_dim
    return replace(
        spec,
        score=None if of.decay is None else decayed(of.decay, spec.align),
        head_dim=(of.feature_map.num_features(dim), spec.v_head_dim),
        scale=dim**-0.5 if spec.scale is None else spec.scale,
        normaliser=Products("products", of.label, of=of, vector_dim=dim),
    )
