"""Grid: heads by the sequence. Some ranks divide heads, and groups of them divide positions.

Ranks of a group, which follow one another, give one another heads, so that each has some heads of
the group's tokens. With these it does what all-to-all does: rows of the same heads come from the
ranks of other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flashgen.distributed.exchange import Exchange
from flashgen.distributed.heads import of_shares, returned_to_tokens
from flashgen.distributed.layout import within
from flashgen.distributed.plan import plan_of_groups
from flashgen.distributed.rows import Rows
from flashgen.distributed.shares import Share, Swap, shares, sides
from flashgen.distributed.work import Work

#: Results of both passes: tensors.
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Grid:
    """Both passes of a rank's heads of its group's queries.

    Attributes:
        work: the call.
        heads: how many the queries and the keys have.
        size: how many ranks a group has.
        parts: groups of heads that travel between groups of ranks, as of `Rows`.
        keep: whether rows of other groups are kept for the backward pass.
    """

    work: Work
    heads: tuple[int, int]
    size: int
    parts: int
    keep: bool

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        """The output of this rank's queries, and what `backward` needs."""
        parts = of_shares(self._divided, q, k, v)
        of_q, of_k, of_v = sides(self._swap.to_heads(parts), parts[self._swap.index])
        result, saved = self._rows.forward(of_q, of_k, of_v, tensors)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        self._swap.to_tokens([result], of_shares(self._divided, out))
        return out, (q, k, v, *saved)

    def backward(
        self, saved: Tensors, tensors: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""
        q, k, v, *of_rows = saved
        parts = of_shares(self._divided, grad_out)
        [mine] = sides(self._swap.to_heads(parts), parts[self._swap.index])
        found, learned = self._rows.backward(tuple(of_rows), tensors, mine)
        return returned_to_tokens(self._swap, self._divided, found, (q, k, v)), learned

    @cached_property
    def _divided(self) -> tuple[Share, ...]:
        return shares(*self.heads, self.size)

    @cached_property
    def _swap(self) -> Swap:
        """The ranks of this one's group."""
        exchange = self.work.exchange
        first = exchange.rank - exchange.rank % self.size
        numbers = tuple(range(first, first + self.size))
        layout = within(exchange.plan.queries, first, self.size)
        return Swap(exchange.group, numbers, exchange.rank - first, layout)

    @cached_property
    def _rows(self) -> Rows:
        """What this rank does with its heads, beside those ranks of other groups that have them."""
        outer, index = self.work.exchange, self._swap.index
        plan = plan_of_groups(outer.plan, self.size, self.work.module.MESH["merges"])
        peers = tuple(range(index, outer.plan.ranks, self.size))
        exchange = Exchange(plan, outer.rank // self.size, outer.group, peers)
        first = self._divided[index].of_q.start
        return Rows(replace(self.work, exchange=exchange, first_head=first), self.parts, self.keep)
