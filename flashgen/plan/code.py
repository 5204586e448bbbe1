"""KernelCode: mask, score and sink as the kernel's text, each part where it is computed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.errors import MaskError
from flashgen.expr import Expr
from flashgen.masks import Mask
from flashgen.params import Float, Int
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.scores import Score
from flashgen.spec import AttentionSpec
from flashgen.symbolic.placement import Assignment, place
from flashgen.symbolic.printer import plain_source, triton_source
from flashgen.symbolic.score import LOG2E, FoldedScore, fold_score, split_infinite

# What the inner loop has in any case.
_AT_HAND = ("q_idx", "batch", "kv_len")

_GATHER = re.compile(r"\b_at_(\d+)d\(")


@dataclass(frozen=True)
class KernelCode:
    """Source text of what differs between variants of one structure.

    Attributes:
        factor: the scores of the softmax in base 2 are the raw products times this positive number,
            ``qk_scale``; ``""`` where `score` says what they are.
        score: an expression of the raw products ``scores``; ``""`` where `factor` says it.
        comment: the score function for a reader; ``""`` where there is none.
        scalars: assignments once a program.
        rows: then once a tile of queries, (BLOCK_M, 1) vectors.
        columns: of each tile of keys, (1, BLOCK_N) vectors that the score reads.
        elements: then what several parts of the score share.
        masked: of each masked tile, what the conditions alone read.
        conditions: of the mask; all of them hold for a key that is seen.
        carried: names from before the loops that are read inside, besides q_idx.
        reads_q_idx: whether the loops read the rows' positions.
        score_reads_kv_idx: whether the score reads the columns' positions.
        sink: the sink's logit in base 2; ``""`` where there is none.
        gathers: the numbers of dimensions that tensors are indexed by.
        uses_tanh: whether ``_tanh`` is called.
    """

    factor: str
    score: str
    comment: str
    scalars: tuple[Assignment, ...]
    rows: tuple[Assignment, ...]
    columns: tuple[Assignment, ...]
    elements: tuple[Assignment, ...]
    masked: tuple[Assignment, ...]
    conditions: tuple[str, ...]
    carried: tuple[str, ...]
    reads_q_idx: bool
    score_reads_kv_idx: bool
    sink: str
    gathers: tuple[int, ...]
    uses_tanh: bool


def kernel_code(spec: AttentionSpec, conditions: tuple[Any, ...]) -> KernelCode:
    """The text of a spec's mask, score and sink.

    Args:
        spec: whose score and sink they are.
        conditions: those of the mask that the kernel evaluates.
    """
    nonnegative = [p.name for p in spec.params if isinstance(p, Int) and p.min >= 0]
    folded = _folded(spec)
    factored = folded.factor is not None and folded.factor_is_positive
    exprs = conditions if factored else (folded.expr, *conditions)
    placed = place(exprs, KERNEL_NAMES, nonnegative=nonnegative)
    scalars = placed.scalars
    if factored and spec.score is not None:
        qk_scale = triton_source(folded.factor, KERNEL_NAMES, nonnegative)
        scalars = (*scalars, Assignment("qk_scale", qk_scale))
    score = "" if factored else placed.results[0]
    of_score = tuple(a for a in placed.columns if not factored and 0 in a.used_by)
    sink = spec.normaliser.traced_sink
    sink_code = "" if sink is None else triton_source(sink.sym * LOG2E, KERNEL_NAMES, nonnegative)
    hoisted = (*scalars, *placed.rows, *placed.columns, *placed.elements)
    everything = (*(a.code for a in hoisted), *placed.results, sink_code)
    return KernelCode(
        factor="qk_scale" if factored else "",
        score=score,
        comment=plain_source(finite_score(spec.score)[0]) if spec.score else "",
        scalars=scalars,
        rows=placed.rows,
        columns=of_score,
        elements=placed.elements,
        masked=tuple(a for a in placed.columns if a not in of_score),
        conditions=placed.results[0 if factored else 1 :],
        carried=tuple(name for name in placed.carried if name not in _AT_HAND),
        reads_q_idx="q_idx" in placed.carried,
        score_reads_kv_idx=_mentions("kv_idx", (score, *(a.code for a in of_score))),
        sink=sink_code,
        gathers=tuple(sorted({int(n) for text in everything for n in _GATHER.findall(text)})),
        uses_tanh=_mentions("_tanh", everything),
    )


def with_hidden_by_score(spec: AttentionSpec) -> Mask:
    """The spec's mask and, of a score function that is -inf somewhere, the condition that it hides.

    Raises:
        MaskError: an infinity that is no mask.
    """
    if spec.score is None:
        return spec.mask
    score, mask = spec.score, spec.mask
    _, condition = finite_score(score)
    if condition is sympy.true:
        return mask

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Expr:
        return mask.traced & Expr(condition, score.params)

    return Mask(both, mask.label, mask.equal_lengths)


def finite_score(score: Score) -> tuple[Any, Any]:
    """The score function without its infinities, and where it has none.

    Raises:
        MaskError: an infinity that is no mask.
    """
    try:
        return split_infinite(score.traced.sym)
    except ValueError as error:
        raise MaskError(f"score {score.label}: {error}") from error


def _folded(spec: AttentionSpec) -> FoldedScore:
    if spec.score is None:
        return fold_score()
    positive = [
        p.name for p in spec.params if isinstance(p, Float) and p.above is not None and p.above >= 0
    ]
    positive += [p.name for p in spec.params if isinstance(p, Int) and p.min > 0]
    return fold_score(finite_score(spec.score)[0], positive)


def _mentions(name: str, texts: Collection[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)
