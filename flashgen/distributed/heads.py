"""Heads: each rank computes some heads of the whole sequence, as Ulysses does.

Queries, keys and values go to the ranks of their heads, outputs come back, and likewise with
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from flashgen.distributed.plan import Call
from flashgen.distributed.shares import Share, Swap, shares, sides
from flashgen.distributed.work import Work, wide

#: Results of both passes: tensors.
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Heads:
    """Both passes of a rank's heads.

    Attributes:
        work: the call; its exchange says where positions are.
    """

    work: Work

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        """The output of this rank's queries, and what `backward` needs."""
        ranks = self._swap
        divided = shares(q.shape[1], k.shape[1], len(ranks.numbers))
        first = divided[ranks.index].of_q.start
        parts = of_shares(divided, q, k, v)
        whole = ranks.to_heads(parts)
        seen_q, seen_k, seen_v = sides(whole, parts[ranks.index])
        result, lse = self.work.attend(self._call, seen_q, seen_k, seen_v, tensors, first)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ranks.to_tokens([result], of_shares(divided, out))
        return out, (q, k, v, whole, result, lse)

    def backward(
        self, saved: Tensors, tensors: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""
        q, k, v, whole, result, lse = saved
        ranks = self._swap
        divided = shares(q.shape[1], k.shape[1], len(ranks.numbers))
        first = divided[ranks.index].of_q.start
        seen_q, seen_k, seen_v = sides(whole, of_shares(divided, q, k, v)[ranks.index])
        [of_out] = sides(ranks.to_heads(of_shares(divided, grad_out)), [result])
        mine = result, lse, of_out
        found = self.work.gradients(self._call, seen_q, seen_k, seen_v, mine, tensors, first)
        return returned_to_tokens(ranks, divided, found[:3], (q, k, v)), [*found[3:]]

    @property
    def _swap(self) -> Swap:
        exchange = self.work.exchange
        numbers = tuple(range(exchange.plan.ranks))
        return Swap(exchange.group, numbers, exchange.rank, exchange.plan.queries)

    @property
    def _call(self) -> Call:
        """All queries and all keys."""
        every = 0, self.work.exchange.plan.queries.length
        return Call(every, 0, every, 0)


def of_shares(
    divided: Sequence[Share], q: torch.Tensor, *of_keys: torch.Tensor
) -> list[list[torch.Tensor]]:
    """For each share its heads: of a tensor of queries' heads, and of tensors of keys' heads."""
    return [[q[:, s.of_q], *(x[:, s.of_k] for x in of_keys)] for s in divided]


def returned_to_tokens(
    ranks: Swap,
    divided: Sequence[Share],
    found: Sequence[torch.Tensor],
    like: Tensors,
) -> Tensors:
    """The gradients of a rank's q, k and v, from those of the ranks' heads.

    Args:
        ranks: that give one another heads.
        divided: the heads of each.
        found: gradients of this rank's heads of q, k and v.
        like: this rank's q, k and v.
    """
    # Heads of keys that several ranks have are added up.
    shared = any(after.of_k.start < share.of_k.stop for share, after in pairwise(divided))
    grads = [torch.empty_like(like[0])]
    for x in like[1:]:
        grads.append(torch.zeros_like(x, dtype=wide(x.dtype)) if shared else torch.empty_like(x))
    ranks.to_tokens(found, of_shares(divided, *grads), (1, 2) if shared else ())
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, like, strict=True))
