"""Whether the outputs are right: each peer's beside attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from benchmarks.cells import WINDOW, Cell

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exact_heads(cell: Cell, inputs: Inputs) -> torch.Tensor:
    """The first and the last head of the batch in float64, (2, seq, v_head_dim)."""
    index = torch.arange(cell.seq_len, device=inputs[0].device)
    distance = index[:, None] - index[None, :]
    hidden = {
        "full": torch.zeros_like(distance, dtype=torch.bool),
        "causal": distance < 0,
        "window": (distance < 0) | (distance > WINDOW),
    }[cell.mask]
    heads = []
    for batch, head in ((0, 0), (-1, -1)):
        q, k, v = (x[batch, head].double() for x in inputs)
        scores = (q @ k.T * cell.qk_head_dim**-0.5).masked_fill_(hidden, -torch.inf)
        heads.append(torch.softmax(scores, -1) @ v)
    return torch.stack(heads)


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
