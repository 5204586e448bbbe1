"""Whether an output is right, on a slice of it: some rows of some heads, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.accuracy import WRONG, Inputs
from benchmarks.attentions import Attention
from benchmarks.cells import Cell

ROWS = 64  # first, middle and last ones of a head


class Slices:
    """The rows that are looked at, and what they should hold.

    Attributes:
        rounding: how far the same is off in torch with weights and output in the inputs' dtype.
    """

    def __init__(self, cell: Cell, attention: Attention, inputs: Inputs) -> None:
        middle = (cell.batch // 2, cell.num_heads // 2)
        self._places = sorted({(0, 0), middle, (cell.batch - 1, cell.num_heads - 1)})
        firsts = (0, max(0, cell.seq_len // 2 - ROWS // 2), max(0, cell.seq_len - ROWS))
        rows = sorted({i for first in firsts for i in range(first, first + ROWS)})
        self._rows = torch.tensor([i for i in rows if i < cell.seq_len], device=inputs[0].device)
        group = cell.num_heads // cell.num_kv_heads
        exact, near = [], []
        for batch, head in self._places:
            q = inputs[0][batch, head, self._rows]
            k, v = (x[batch, head // group] for x in inputs[1:])
            weights = _weights(attention, q, k, self._rows, batch, head)
            exact.append(weights @ v.double())
            largest = weights.amax(-1, keepdim=True)
            low = (weights / largest).to(v.dtype)
            sums = (weights / largest).sum(-1, keepdim=True)
            near.append((low.double() @ v.double() / sums).to(v.dtype).double())
        self._exact = torch.stack(exact)
        self.rounding = self._relative(torch.stack(near))
        self._unit = torch.finfo(inputs[0].dtype).eps

    def error(self, out: torch.Tensor) -> float:
        """The norm of the difference over the norm; NaN where the slice is not finite."""
        found = torch.stack([out[b, h, self._rows].double() for b, h in self._places])
        return self._relative(found)

    def limit(self, others: Sequence[float]) -> float:
        """The most that an output may be off.

        Twice what rounding costs, here or in the worst of the others that are right, and a quarter
        of a unit in the last place.
        """
        right = [error for error in others if error <= WRONG]
        return 2 * max([self.rounding, *right]) + self._unit / 4

    def _relative(self, found: torch.Tensor) -> float:
        return float((found - self._exact).norm() / self._exact.norm())


def _weights(
    attention: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
    head: int,
) -> torch.Tensor:
    """Of these rows of a head, (rows, keys) float64."""
    b, h = (torch.tensor(i, device=q.device) for i in (batch, head))
    q_idx, kv_idx = rows[:, None], torch.arange(k.shape[0], device=q.device)
    scores = q.double() @ k.double().T * q.shape[1] ** -0.5
    if attention.score_mod:
        scores = attention.score_mod(scores, b, h, q_idx, kv_idx)
    if attention.mask_mod:
        seen = attention.mask_mod(b, h, q_idx, kv_idx)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1)
