"""Passes: a strategy as an operation that autograd knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flashgen.distributed.work import Work


class Strategy(Protocol):
    """Both passes of one rank."""

    @property
    def work(self) -> Work:
        """The call."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output of this rank's queries, and what `backward` needs."""

    def backward(
        self,
        saved: tuple[torch.Tensor, ...],
        tensors: Sequence[torch.Tensor],
        grad_out: torch.Tensor,
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""


def run(
    strategy: Strategy,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """The output of a rank's queries: see `flashgen.distributed.attend`."""
    out: torch.Tensor = _Attention.apply(strategy, q, k, v, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """The attention of a rank's queries."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, strategy: Strategy, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors
    ) -> torch.Tensor:
        out, saved = strategy.forward(q, k, v, tensors)
        ctx.strategy, ctx.number = strategy, len(saved)
        ctx.save_for_backward(*saved, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: torch.Tensor):  # type: ignore[no-untyped-def]
        strategy: Strategy = ctx.strategy
        every = ctx.saved_tensors  # read once: a checkpoint computes them when they are read
        saved, tensors = every[: ctx.number], every[ctx.number :]
        grads, learned = strategy.backward(saved, tensors, grad_out)
        work = strategy.work
        for total in learned if work.reduce_learned else ():
            dist.all_reduce(total, group=work.exchange.group)
        of_tensors = dict(zip(work.module.MESH["learned"], learned, strict=True))
        return (
            None,
            *grads,
            *(
                of_tensors[name].to(x.dtype) if name in of_tensors else None
                for name, x in zip(work.tensors, tensors, strict=True)
            ),
        )
