"""Gather: all rows of keys to all ranks by one all-gather, and their gradients back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from flashgen.distributed.exchange import Exchange, Returned, Transfer, pack, row_shape


@dataclass(frozen=True, eq=False)
class Gather(Exchange):
    """The rows of all ranks, by a plan in which each rank needs all of them."""

    @property
    def _most(self) -> int:
        """The rows of a rank, at most: collectives move as many of each."""
        return max(self.plan.keys.lengths)

    def bring(self, k: torch.Tensor, v: torch.Tensor) -> Transfer:
        """See `Exchange.bring`."""
        own = k.new_zeros(self._most, *row_shape(k, v))
        pack(own[: k.shape[2]], k, v, slice(None))
        found = own.new_empty(self.plan.ranks * self._most, *own.shape[1:])
        work = dist.all_gather_into_tensor(found, own, group=self.group, async_op=True)

        def in_order() -> torch.Tensor:
            rows = found.new_empty(self.rows, *found.shape[1:])
            for (begin, end), at in self._blocks():
                rows[begin:end] = found[at : at + end - begin]
            return rows

        return Transfer(in_order, [work], [own])

    def give_back(self, grads: torch.Tensor) -> Returned:
        """See `Exchange.give_back`."""
        blocks = grads.new_zeros(self.plan.ranks * self._most, *grads.shape[1:])
        for (begin, end), at in self._blocks():
            blocks[at : at + end - begin] = grads[begin:end]
        found = torch.empty_like(blocks)
        work = dist.all_to_all_single(found, blocks, group=self.group, async_op=True)
        length = self.plan.keys.lengths[self.rank]
        parts = found.view(self.plan.ranks, self._most, *grads.shape[1:])[:, :length]
        return Returned([((0, length), parts)], [work], [blocks])

    def _blocks(self) -> list[tuple[tuple[int, int], int]]:
        """The positions of each chunk, and where it lies among the blocks of all ranks."""
        keys = self.plan.keys
        sizes = ([end - begin for begin, end in chunks] for chunks in keys.chunks)
        return [
            (span, rank * self._most + start)
            for rank, (chunks, lengths) in enumerate(zip(keys.chunks, sizes, strict=True))
            for span, start in zip(chunks, accumulate(lengths, initial=0), strict=False)
        ]
