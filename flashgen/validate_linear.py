"""What linear attention cannot have: findings on the fields of a spec with a linear normaliser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashgen.config import FORMS
from flashgen.errors import one_of
from flashgen.normalisers import Linear
from flashgen.plan.linear import MOST_FEATURES, WIDEST
from flashgen.plan.pairs import (
    ALGORITHMS,
    LINEAR_MASKS,
    goes_over_pairs,
    has_runs,
    shows_later_keys,
    why_not_linear,
)
from flashgen.spec import AttentionSpec, Blocks
from flashgen.validate_matrices import Finding, matrix_findings

#: The form that linear attention may have besides the dense one.
PACKED = "varlen"

#: The most features of a vector that kernels over all pairs multiply.
MOST_OF_PAIRS = 512


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
    elif traced is not None:
        yield from _findings_of_mask(spec, normaliser, traced)
    if spec.score is not None:
        problem = "linear attention has weights without a score function"
        yield "score", spec.score, problem, "put it into the feature map, or leave it out"
    quadratic = traced is not None and goes_over_pairs(spec, traced)
    if spec.dropout is True:
        problem = "linear attention has no weights to drop: a state holds their sums"
        if quadratic:
            problem = "linear attention drops no weights, by no algorithm"
        yield "dropout", True, problem, "leave it out"
    if spec.dtype == "float16":
        problem = "sums of products of features leave the range of float16"
        yield "dtype", spec.dtype, problem, "write 'bfloat16' or 'float32'"
    if isinstance(spec.blocks, Blocks) and not quadratic:
        for field in ("BLOCK_N", "num_warps"):
            if (value := getattr(spec.blocks, field)) is not None:
                problem = "a chunk has BLOCK_M rows, and its state gives the number of warps"
                yield f"blocks.{field}", value, problem, "pin BLOCK_M and num_stages alone"
    forms = set(spec.forms) & set(FORMS) if isinstance(spec.forms, tuple) else set()
    if quadratic and forms - {FORMS[0]}:
        problem = "linear attention over all pairs has the dense form alone, as it has no states"
        yield "forms", spec.forms, problem, f"write forms=({FORMS[0]!r},)"
    elif forms - {FORMS[0], PACKED}:
        problem = "linear attention has the dense form and that of packed sequences alone"
        yield "forms", spec.forms, problem, f"write forms=({FORMS[0]!r},) or add {PACKED!r}"


def _findings_of_mask(spec: AttentionSpec, normaliser: Linear, traced: Any) -> Iterator[Finding]:
    """What its mask leaves to no algorithm, or not to the one that it insists on."""
    why, insists = why_not_linear(spec, traced), normaliser.algorithm
    decays = normaliser.decay is not None
    if insists == "linear" and why:
        field, value = ("mask", spec.mask) if spec.align is None else ("align", spec.align)
        remedy = "write full(), causal(), causal() & document() or causal() & chunked(n)"
        remedy = remedy if spec.align is None else "leave it out"
        yield field, value, why, f"{remedy}, or leave algorithm='linear' out"
    elif goes_over_pairs(spec, traced) and _of_features(normaliser):
        problem = "with a decay for each feature, weights are no products of features alone"
        if insists == "quadratic":
            yield "normaliser", normaliser, problem, "leave algorithm out, or write 'linear'"
        else:
            yield "mask", spec.mask, f"{why}, and {problem}", "write causal(), or leave decay out"
    elif decays and shows_later_keys(spec, traced):
        problem = "a decay is for keys in the order of queries, and this mask shows later ones"
        remedy = "write causal()" if traced == LINEAR_MASKS[1] else "add & causal() to it"
        yield "mask", spec.mask, problem, f"{remedy}, or leave decay out"
    elif has_runs(spec, traced) and _of_features(normaliser):
        problem = "with a decay for each feature, a state does not start anew where a run does yet"
        remedy = "write causal() and pass -inf where runs start, or give a decay for each key"
        yield "mask", spec.mask, problem, remedy


def _of_features(normaliser: Linear) -> int:
    """The features of a key that each have a decay, if they have."""
    return 0 if normaliser.decay is None else normaliser.decay.features


def feature_findings(spec: AttentionSpec, normaliser: Linear, traced: Any) -> Iterator[Finding]:
    """Whether kernels are for as many features, of head dims that are valid.

    Args:
        spec: the variant.
        normaliser: its normaliser.
        traced: its mask's expression; None for a mask with findings of its own.
    """
    if traced is not None and goes_over_pairs(spec, traced):
        features = normaliser.feature_map.num_features(spec.qk_head_dim)
        if features > MOST_OF_PAIRS:
            problem = f"{features} features of a vector: products of pairs have {MOST_OF_PAIRS}"
            yield "normaliser", normaliser, problem, "change their number, or head_dim"
        if normaliser.feature_map.matrices:  # of maps that begin with a product
            problem = "kernels over all pairs multiply q and k by no matrix first"
            yield "normaliser", normaliser, problem, "multiply them before the call"
    else:
        yield from _state_findings(spec, normaliser)
    if normaliser.feature_map.random and not normaliser.normalise:
        problem = (
            "random features are divided by their largest, which cancels in normalised weights only"
        )
        yield "normaliser", normaliser, problem, "leave normalise=False out"


def _state_findings(spec: AttentionSpec, normaliser: Linear) -> Iterator[Finding]:
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
