"""Checks of results: each peer's output and gradients against attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.attentions import ROWS, Attention
from benchmarks.cells import Cell
from flashgen.philox import kept, kept_scale

#: Relative errors of a different computation: rounding gives 2e-3, and up to 1e-2 for gradients of
#: learned tensors, sums whose terms cancel.
WRONG, WRONG_SUM = 0.02, 0.05
#: FlexAttention computes such sums less exactly, with an error of 0.085: still the same gradient.
WRONG_SUM_OF_PEER = 0.25

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: What a peer computes: its output, or gradients.
Results = Sequence[torch.Tensor]


def exact_heads(cell: Cell, attention: Attention, inputs: Inputs) -> list[torch.Tensor]:
    """The output's first and last head of the batch in float64, (2, seq, v_head_dim)."""
    heads = []
    for batch, head in _places(cell):
        q, k, v = (x[batch, head].double() for x in inputs)
        tiles = [out for _, out in _tiles(attention, q, k, v, batch, head)]
        heads.append(torch.cat(tiles).detach())
    return [torch.stack(heads)]


def exact_gradients(cell: Cell, attention: Attention, inputs: Inputs) -> list[torch.Tensor]:
    """Gradients of q, k and v for the same heads, where the output's gradient is `make_gradient`.

    Then those heads' elements of each learned tensor: their gradients belong to one head of one
    sequence.

    Raises:
        ValueError: several sequences add to a learned tensor.
    """
    if attention.learned and cell.batch > 1:
        raise ValueError(f"{cell.name}: gradients of {attention.learned} of {cell.batch} sequences")
    grad_out = make_gradient(cell, inputs[0].device)
    learned = [attention.parameters[name] for name in attention.learned]
    heads = []
    for batch, head in _places(cell):
        qkv = [x[batch, head].double().requires_grad_() for x in inputs]
        sums = [torch.zeros_like(x) for x in (*qkv, *learned)]
        with torch.enable_grad():
            for rows, out in _tiles(attention, *qkv, batch, head):
                grads = torch.autograd.grad(
                    out, (*qkv, *learned), grad_out[batch, head, rows].double()
                )
                sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
        heads.append([*sums[:3], *(total[head] for total in sums[3:])])
    return [torch.stack(pair) for pair in zip(*heads, strict=True)]


def make_gradient(cell: Cell, device: torch.device) -> torch.Tensor:
    """A gradient of the output: normal, (batch, heads, seq, v_head_dim), the same every time."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (cell.batch, cell.num_heads, cell.seq_len, cell.v_head_dim)
    return torch.randn(shape, generator=generator, dtype=getattr(torch, cell.dtype), device=device)


def _places(cell: Cell) -> tuple[tuple[int, int], ...]:
    return (0, 0), (cell.batch - 1, cell.num_heads - 1)


def _tiles(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, head: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of `ROWS` queries: their indices, and the output of one head of one sequence."""
    b, h = (torch.tensor(i, device=q.device) for i in (batch, head))
    kv_idx = torch.arange(k.shape[0], device=q.device)
    for first in range(0, q.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        q_idx = kv_idx[rows, None]
        scores = q[rows] @ k.T * q.shape[1] ** -0.5
        if attention.score_mod:
            scores = attention.score_mod(scores, b, h, q_idx, kv_idx)
        if attention.mask_mod:
            seen = attention.mask_mod(b, h, q_idx, kv_idx)
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1)
        if attention.dropout_p:
            weights = weights * _dropped(attention, weights, (batch, head, first, 0))
        yield rows, weights @ v


def _dropped(
    attention: Attention, weights: torch.Tensor, first: tuple[int, int, int, int]
) -> torch.Tensor:
    """Factors of flashgen's dropout for weights, (rows, keys), from a first place on."""
    p, seed = attention.dropout_p, attention.parameters["seed"]
    keeps = kept((1, 1, *weights.shape), p, seed, weights.device, first)[0, 0]
    return keeps * kept_scale(p)


def relative_error(results: Results, expected: Results) -> float:
    """Norm of the difference over the norm, of the two heads; the largest of all results.

    NaN if a result is not finite everywhere, 0 without results.
    """
    if not all(torch.isfinite(x).all() for x in results):
        return float("nan")
    errors = (_error(x, exact) for x, exact in zip(results, expected, strict=True))
    return max(errors, default=0.0)


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    first, last = (x[0, 0], x[-1, -1]) if x.ndim == 4 else (x[0], x[-1])
    heads = torch.stack([first, last]).detach().double()
    return float((heads - exact).norm() / exact.norm())


def wrong_cells(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The cells whose flashgen results are over twice as far from float64 as the worst peer's.

    Gradients of learned tensors are one number for each head: chance decides whose is nearer, so
    they are wrong only beyond `WRONG_SUM`.
    """
    wrong = []
    for row in rows:
        errors = dict(row["error"])
        own = errors.pop("flashgen")
        of_sums = row.get("error_of_learned", {}).get("flashgen", 0.0)
        # Without a peer for the variant, the general limit applies. NaN is wrong, too.
        most = 2 * max(errors.values()) if errors else WRONG
        if not (own <= most and of_sums <= WRONG_SUM):
            wrong.append(" ".join([row["cell"], *([row["inputs"]] if "inputs" in row else [])]))
    return wrong
