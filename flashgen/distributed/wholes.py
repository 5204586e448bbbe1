"""Wholes: a tensor of all positions, and the part of it that a rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashgen.distributed.layout import Layout


def part_of(x: torch.Tensor, layout: Layout, rank: int, dim: int) -> torch.Tensor:
    """A rank's part of a whole tensor."""
    runs = [x.narrow(dim, begin, end - begin) for begin, end in layout.chunks[rank]]
    return torch.cat(runs, dim) if len(runs) > 1 else runs[0].contiguous()


def whole_of(x: torch.Tensor, layout: Layout, group: Any, dim: int) -> torch.Tensor:
    """The whole of a tensor whose parts the ranks of a group have, on each of them."""
    moved = x.movedim(dim, 0)
    most = max(layout.lengths)
    padded = moved.new_zeros(most, *moved.shape[1:])
    padded[: len(moved)] = moved
    found = moved.new_empty(layout.ranks * most, *moved.shape[1:])
    dist.all_gather(list(found.chunk(layout.ranks)), padded, group=group)
    whole = moved.new_empty(layout.length, *moved.shape[1:])
    for rank, spans in enumerate(layout.chunks):
        for (begin, end), start in zip(spans, layout.starts(rank), strict=True):
            at = rank * most + start
            whole[begin:end] = found[at : at + end - begin]
    return whole.movedim(0, dim)


def part_with_gradient(x: torch.Tensor, layout: Layout, group: Any, dim: int) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have, and compute alike.

    The gradient is the whole's, on each of them.
    """
    part: torch.Tensor = _PartOf.apply(x, layout, group, dim)  # type: ignore[no-untyped-call]
    return part


def whole_with_gradient(x: torch.Tensor, layout: Layout, group: Any, dim: int) -> torch.Tensor:
    """The whole of parts, from which all ranks compute alike: the gradient is a part of any's."""
    whole: torch.Tensor = _WholeOf.apply(x, layout, group, dim)  # type: ignore[no-untyped-call]
    return whole


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, layout: Layout, group: Any, dim: int
    ) -> torch.Tensor:
        ctx.of = layout, group, dim
        return part_of(x, layout, dist.get_rank(group), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return whole_of(grad, *ctx.of), None, None, None


class _WholeOf(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: torch.Tensor, layout: Layout, group: Any, dim: int
    ) -> torch.Tensor:
        ctx.of = layout, dist.get_rank(group), dim
        return whole_of(x, layout, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return part_of(grad, *ctx.of), None, None, None
