"""Checks of results in float64, on a slice: some rows, or some groups of heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.accuracy import WRONG, Inputs, make_gradient
from benchmarks.attentions import ROWS as ROWS_AT_ONCE
from benchmarks.attentions import Attention
from benchmarks.cells import Cell

ROWS = 64  # first, middle and last rows of a head


class Slices:
    """The checked rows of an output, with their exact values.

    Attributes:
        rounding: the error in torch with weights and output in the inputs' dtype.
    """

    rounding: float

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
        self._dtype = inputs[0].dtype

    def error(self, out: torch.Tensor) -> float:
        """The norm of the difference over the norm; NaN where the slice is not finite."""
        found = torch.stack([out[b, h, self._rows].double() for b, h in self._places])
        return self._relative(found)

    def limit(self, others: Sequence[float]) -> float:
        """The largest error of a correct output; see `limit_of`."""
        return limit_of(self.rounding, others, self._dtype)

    def _relative(self, found: torch.Tensor) -> float:
        return float((found - self._exact).norm() / self._exact.norm())


class GradientSlices:
    """Gradients of the first and the last head of keys, and of the heads of queries that share it.

    The output's gradient is `make_gradient`'s.

    Attributes:
        rounding: the largest of their errors in torch with weights, their gradients, the output and
            the results rounded to the inputs' dtype.
    """

    rounding: float

    def __init__(self, cell: Cell, attention: Attention, inputs: Inputs) -> None:
        self._group = cell.num_heads // cell.num_kv_heads
        self._places = sorted({(0, 0), (cell.batch - 1, cell.num_kv_heads - 1)})
        self._dtype = inputs[0].dtype
        grad_out = make_gradient(cell, inputs[0].device)
        found = [
            _of_group(attention, inputs, grad_out, *place, self._group) for place in self._places
        ]
        exact, near = zip(*found, strict=True)
        self._exact = [torch.stack(grads) for grads in zip(*exact, strict=True)]
        self.rounding = self._worst([torch.stack(grads) for grads in zip(*near, strict=True)])

    def error(self, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor) -> float:
        """The norm of the difference over the norm, of the worst; NaN if one is not finite."""
        of_groups = grad_q.unflatten(1, (-1, self._group))
        return self._worst(
            [
                torch.stack([x[place].double() for place in self._places])
                for x in (of_groups, grad_k, grad_v)
            ]
        )

    def limit(self, others: Sequence[float]) -> float:
        """The largest error of correct gradients; see `limit_of`."""
        return limit_of(self.rounding, others, self._dtype)

    def _worst(self, found: Sequence[torch.Tensor]) -> float:
        errors = [
            (mine - exact).norm() / exact.norm()
            for mine, exact in zip(found, self._exact, strict=True)
        ]
        return float(torch.stack(errors).max())


def limit_of(rounding: float, others: Sequence[float], dtype: torch.dtype) -> float:
    """The largest error of correct results.

    Twice the error of rounding, here or in the worst of the other correct results, plus a quarter
    of a unit in the last place.
    """
    right = [error for error in others if error <= WRONG]
    return 2 * max([rounding, *right]) + torch.finfo(dtype).eps / 4


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _of_group(
    attention: Attention,
    inputs: Inputs,
    grad_out: torch.Tensor,
    batch: int,
    kv_head: int,
    group: int,
) -> tuple[Gradients, Gradients]:
    """Gradients of a head of keys and of its queries, in float64 and with rounding."""
    dtype, scale = inputs[0].dtype, inputs[0].shape[3] ** -0.5

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double()

    k, v = (x[batch, kv_head].double() for x in inputs[1:])
    sums = [torch.zeros_like(x) for x in (k, v, k, v)]
    of_queries: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for head in range(kv_head * group, (kv_head + 1) * group):
        queries, gradients = inputs[0][batch, head], grad_out[batch, head]
        for rows in torch.arange(len(queries), device=k.device).split(ROWS_AT_ONCE):
            q, of_out = queries[rows].double(), gradients[rows].double()
            weights, slope = _weights_and_slope(attention, q, k, rows, batch, head)
            out, of_weights = weights @ v, of_out @ v.T
            for number, rounded in enumerate((lambda x: x, low)):
                delta = (of_out * rounded(out)).sum(-1, keepdim=True)
                of_scores = rounded(weights * (of_weights - delta) * slope)
                of_queries[number].append(of_scores @ k * scale)
                sums[2 * number] += of_scores.T @ q * scale
                sums[2 * number + 1] += rounded(weights).T @ of_out
    exact, near = (torch.cat(found).view(group, -1, k.shape[1]) for found in of_queries)
    return (exact, sums[0], sums[1]), (low(near), low(sums[2]), low(sums[3]))


def _weights(
    attention: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
    head: int,
) -> torch.Tensor:
    """The weights of these rows of a head, (rows, keys) float64."""
    return _weights_and_slope(attention, q, k, rows, batch, head)[0]


def _weights_and_slope(
    attention: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    batch: int,
    head: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of these rows of a head, and how their scores move with the products, in float64."""
    b, h = (torch.tensor(i, device=q.device) for i in (batch, head))
    q_idx, kv_idx = rows[:, None], torch.arange(k.shape[0], device=q.device)
    scores = q.double() @ k.double().T * q.shape[1] ** -0.5
    slope = torch.ones((), dtype=scores.dtype, device=scores.device)
    if attention.score_mod:
        with torch.enable_grad():
            products = scores.detach().requires_grad_()
            made = attention.score_mod(products, b, h, q_idx, kv_idx)
            [slope] = torch.autograd.grad(made.sum(), products)
        scores = made.detach()
    if attention.mask_mod:
        seen = attention.mask_mod(b, h, q_idx, kv_idx)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1), slope
