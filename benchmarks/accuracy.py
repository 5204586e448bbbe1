"""Whether the outputs are right: each peer's beside attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from benchmarks.attentions import ROWS, Attention
from benchmarks.cells import Cell

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exact_heads(cell: Cell, attention: Attention, inputs: Inputs) -> torch.Tensor:
    """The first and the last head of the batch in float64, (2, seq, v_head_dim)."""
    places = ((0, 0), (cell.batch - 1, cell.num_heads - 1))
    return torch.stack([_exact_head(attention, inputs, *place) for place in places])


def _exact_head(attention: Attention, inputs: Inputs, batch: int, head: int) -> torch.Tensor:
    q, k, v = (x[batch, head].double() for x in inputs)
    b, h = (torch.tensor(i, device=q.device) for i in (batch, head))
    kv_idx = torch.arange(k.shape[0], device=q.device)
    out = []
    for q_idx in torch.split(kv_idx[:, None], ROWS):
        scores = q[q_idx[:, 0]] @ k.T * q.shape[1] ** -0.5
        if attention.score_mod:
            scores = attention.score_mod(scores, b, h, q_idx, kv_idx)
        if attention.mask_mod:
            seen = attention.mask_mod(b, h, q_idx, kv_idx)
            scores = scores.masked_fill(~seen, -torch.inf)
        out.append(torch.softmax(scores, -1) @ v)
    return torch.cat(out)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm, of the two heads of `exact_heads`.

    NaN where the output is not finite everywhere.
    """
    if not torch.isfinite(out).all():
        return float("nan")
    heads = torch.stack([out[0, 0], out[-1, -1]]).double()
    return float((heads - expected).norm() / expected.norm())


def wrong_cells(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The cells whose flashgen output is over twice as far from float64 as the worst peer's."""
    wrong = []
    for row in rows:
        errors = dict(row["error"])
        own = errors.pop("flashgen")
        if not own <= 2 * max(errors.values(), default=0.0):  # NaN is wrong too
            wrong.append(row["cell"])
    return wrong
