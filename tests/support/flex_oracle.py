"""FlexAttention's arithmetic in float64, for comparison: its functions vmapped over all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

Function = Callable[..., Any]


def over_pairs(function: Function, sizes: tuple[int, ...], *score: torch.Tensor) -> torch.Tensor:
    """What a function returns for each batch entry, head, query and key."""
    positions = [torch.arange(n) for n in sizes]
    for at in (3, 2, 1, 0):
        axes = tuple(0 if i == at else None for i in range(4))
        function = torch.vmap(function, in_dims=(0,) * len(score) + axes)
    with TransformGetItemToIndex():
        return function(*score, *positions)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    scale: float | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp; rows without keys are 0 and -inf.

    Args:
        query, key, value: (batch, heads, seq, head_dim).
        score_mod, mask_mod: of FlexAttention.
        scale: factor on the scores; None is ``head_dim ** -0.5``.
        seen: bool, for broadcasting with the scores: another mask.
    """
    group = query.shape[1] // key.shape[1]
    query = query.double()
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = over_pairs(score_mod, sizes, scores).double()
    if mask_mod is not None:
        scores = scores.masked_fill(~over_pairs(mask_mod, sizes).bool(), -math.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(-1e300)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    return weights @ value / total, lse.squeeze(-1)
