"""What linear attention cannot have: findings on the fields of a spec with a linear normaliser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashgen.config import FORMS
from flashgen.constants import Constant
from flashgen.errors import one_of
from flashgen.normalisers import Linear
from flashgen.params import Tensor
from flashgen.plan.linear import LINEAR_MASKS, MOST_FEATURES, WIDEST
from flashgen.plan.runs import runs_of
from flashgen.spec import AttentionSpec, Blocks
from flashgen.validate_matrices import matrix_findings

#: The form that linear attention may have besides the dense one.
PACKED = "varlen"

#: How linear attention can be computed.
ALGORITHMS = ("linear", "quadratic")

# A finding: a field, its value, the mistake, and what to write instead.
Finding = tuple[str, object, str, str]


def linear_findings(spec: AttentionSpec, normaliser: Linear, traced: Any) -> Iterator[Finding]:
    """What linear attention cannot have, or cannot have yet.

    Args:
        spec: the variant.
        normaliser: its normaliser.
        traced: its mask's expression; None for a mask with findings of its own.
    """
    if not isinstance(normaliser.normalise, bool):
        problem = "normalise is neither True nor False"
        yield "normaliser", normaliser, problem, "write normalise=False, or leave it out"
    if normaliser.algorithm not in (None, *ALGORITHMS):
        problem = f"{normaliser.algorithm!r} is no algorithm"
        yield "normaliser", normaliser, problem, one_of((None, *ALGORITHMS))
    elif normaliser.algorithm == "quadratic" and _of_features(normaliser):
        problem = "with a decay for each feature, weights are no products of features alone"
        yield "normaliser", normaliser, problem, "leave algorithm out, or write 'linear'"
    elif normaliser.algorithm == "quadratic":
        problem = "there is no quadratic kernel of linear attention yet"
        yield "normaliser", normaliser, problem, "leave algorithm out, or write 'linear'"
    of_runs = traced is not None and _has_runs(spec, traced)
    if spec.align is not None:
        problem = "linear attention with a causal mask is for as many keys as queries"
        yield "align", spec.align, problem, "leave it out"
    elif traced is not None and traced not in LINEAR_MASKS and not of_runs:
        problem = "sums over its keys do not factor, and there is no quadratic kernel yet"
        remedy = "write full(), causal(), causal() & document() or causal() & chunked(n)"
        yield "mask", spec.mask, problem, remedy
    elif traced == LINEAR_MASKS[1] and normaliser.decay is not None:
        problem = "a decay is for keys in the order of queries, and this mask shows later ones"
        yield "mask", spec.mask, problem, "write causal(), or leave decay out"
    elif of_runs and _of_features(normaliser):
        problem = "with a decay for each feature, a state does not start anew where a run does yet"
        remedy = "write causal() and pass -inf where runs start, or give a decay for each key"
        yield "mask", spec.mask, problem, remedy
    if spec.score is not None:
        problem = "linear attention has weights without a score function"
        yield "score", spec.score, problem, "put it into the feature map, or leave it out"
    if spec.dropout is True:
        problem = "linear attention has no weights to drop: a state holds their sums"
        yield "dropout", True, problem, "leave it out"
    if spec.dtype == "float16":
        problem = "sums of products of features leave the range of float16"
        yield "dtype", spec.dtype, problem, "write 'bfloat16' or 'float32'"
    if isinstance(spec.blocks, Blocks):
        for field in ("BLOCK_N", "num_warps"):
            if (value := getattr(spec.blocks, field)) is not None:
                problem = "a chunk has BLOCK_M rows, and its state gives the number of warps"
                yield f"blocks.{field}", value, problem, "pin BLOCK_M and num_stages alone"
    if isinstance(spec.forms, tuple) and (set(spec.forms) & set(FORMS)) - {FORMS[0], PACKED}:
        problem = "linear attention has the dense form and that of packed sequences alone"
        yield "forms", spec.forms, problem, f"write forms=({FORMS[0]!r},) or add {PACKED!r}"


def _of_features(normaliser: Linear) -> int:
    """The features of a key that each have a decay, if they have."""
    return 0 if normaliser.decay is None else normaliser.decay.features


def _has_runs(spec: AttentionSpec, traced: Any) -> bool:
    """Whether a mask has runs, by ids of which the call passes one for each position."""
    runs = runs_of(traced)
    if runs is None or not runs.of_ids:
        return runs is not None
    [ids] = (p for p in spec.mask.params if isinstance(p, Tensor) and p.sym == runs.tensor)
    return not isinstance(ids, Constant) and ids.names[-1] in ("q_len", "kv_len")


def state_findings(spec: AttentionSpec, normaliser: Linear) -> Iterator[Finding]:
    """Whether programs can hold a state of features x v_head_dim, of head dims that are valid."""
    dims = spec.head_dim if isinstance(spec.head_dim, tuple) else (spec.head_dim,)
    if normaliser.feature_map.matrices:
        yield from matrix_findings(spec, normaliser)
        dims = dims[-1:]  # q and k are read as products, of as many columns as these have
    if any(dim > WIDEST for dim in dims):
        problem = f"a program holds a state of features x v_head_dim, of at most {WIDEST} each"
        yield "head_dim", spec.head_dim, problem, f"write at most {WIDEST}"
        return
    features = normaliser.feature_map.num_features(spec.qk_head_dim)
    if features > MOST_FEATURES or (features > WIDEST and features % WIDEST):
        problem = (
            f"{features} features of a vector: kernels are for at most {WIDEST}, or a multiple of "
            f"it up to {MOST_FEATURES}"
        )
        yield "normaliser", normaliser, problem, "change their number, or head_dim"
    of_decay = _of_features(normaliser)
    if of_decay and normaliser.feature_map.random:
        problem = "a decay for each feature is learned, and random features are drawn anew"
        yield "normaliser", normaliser, problem, "give one for each key, or another feature map"
    elif of_decay and of_decay != features:
        problem = f"a decay for each of {of_decay} features, and a vector has {features}"
        yield "normaliser", normaliser, problem, f"declare the tensor with {features} in its dims"
    elif of_decay and features > WIDEST:
        problem = f"with a decay for each feature, a vector has at most {WIDEST}"
        yield "normaliser", normaliser, problem, "give one for each key, or make fewer features"
    if normaliser.feature_map.random and not normaliser.normalise:
        problem = (
            "random features are divided by their largest, which cancels in normalised weights only"
        )
        yield "normaliser", normaliser, problem, "leave normalise=False out"
