"""Ring: keys of one rank after another, while those of the next travel.

In step d a rank computes with the rows of the rank d places before it, so that it holds the rows of
two ranks at most, whatever the number of ranks. The partial results are merged by their
log-sum-exps in float32, in the order of the steps. Gradients of keys go straight to their owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from flashgen.distributed.exchange import Returned, Transfer, pack, returned, row_shape, swap
from flashgen.distributed.lanes import Lanes
from flashgen.distributed.layout import Span
from flashgen.distributed.work import Chunk, Work, in_order, unseen, wide

#: Results of both passes: tensors.
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Ring:
    """Both passes of a rank's queries, with the rows of one rank at a time.

    Attributes:
        work: the calls.
    """

    work: Work

    @cached_property
    def steps(self) -> tuple[tuple[Chunk, ...], ...]:
        """For each step the chunks of queries and their calls, whose keys are a run of its rows."""
        exchange = self.work.exchange
        return tuple(
            tuple(exchange.plan.calls_between(self._peers(d)[0], exchange.rank))
            for d in range(exchange.plan.ranks)
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        """The output of this rank's queries, and what `backward` needs."""
        found: dict[Span, tuple[torch.Tensor, torch.Tensor]] = {}
        for step, (keys, values) in enumerate(self._arriving(k, v)):
            lanes = Lanes(q.device, sum(len(calls) for _, calls in self.steps[step]))
            results = [
                (
                    span,
                    [lanes.run(self.work.attend, call, q, keys, values, tensors) for call in calls],
                )
                for span, calls in self.steps[step]
            ]
            lanes.join()
            for span, new in results:
                if span not in found and len(new) == 1:
                    found[span] = new[0]
                    continue
                parts = [*([found[span]] if span in found else []), *new]
                dtype = wide(q.dtype)
                found[span] = self.work.merged([(out.to(dtype), lse) for out, lse in parts])
        for span in self._spans:
            if span not in found:
                found[span] = unseen(q[:, :, slice(*span)], v)
        empty = unseen(q[:, :, :0], v)
        out = in_order([(span, out.to(q.dtype)) for span, (out, _) in found.items()], empty[0])
        lse = in_order([(span, lse) for span, (_, lse) in found.items()], empty[1])
        return out, (q, k, v, out, lse)

    def backward(
        self, saved: Tensors, tensors: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""
        q, k, v, out, lse = saved
        dtype = wide(q.dtype)
        grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
        sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
        part = [torch.empty_like(x) for x in (k, v)]
        learned = self.work.no_learned(tensors)
        mine = {
            span: tuple(x[:, :, slice(*span)].contiguous() for x in (out, lse, grad_out))
            for span in self._spans
        }
        going: Returned | None = None

        def take() -> None:
            if going is not None:
                going.add_to(*part)
                for total, x in zip(sums, part, strict=True):
                    total += x

        for step, (keys, values) in enumerate(self._arriving(k, v)):
            lanes = Lanes(q.device, sum(len(calls) for _, calls in self.steps[step]))
            results = [
                (
                    call,
                    lanes.run(self.work.gradients, call, q, keys, values, mine[span], tensors),
                )
                for span, calls in self.steps[step]
                for call in calls
            ]
            take()  # the gradients of the step before have travelled meanwhile
            lanes.join()
            shape = keys.shape[2], *row_shape(keys, values)
            rows = torch.zeros(shape, dtype=dtype, device=q.device)
            for call, (of_q, of_k, of_v, *of_learned) in results:
                grad_q[:, :, slice(*call.queries)] += of_q
                at = rows[slice(*call.keys)]
                at[..., : k.shape[3]] += of_k.permute(2, 0, 1, 3)
                at[..., k.shape[3] :] += of_v.permute(2, 0, 1, 3)
                for total, x in zip(learned, of_learned, strict=True):
                    total += x
            going = self._give_back(step, rows.to(k.dtype))
        take()
        return (grad_q.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)), learned

    @property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(span for span, _ in self.work.chunks)

    def _peers(self, step: int) -> tuple[int, int]:
        """The rank whose rows this one computes with in a step, and the one that has its rows."""
        rank, ranks = self.work.exchange.rank, self.work.exchange.plan.ranks
        return (rank - step) % ranks, (rank + step) % ranks

    def _arriving(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The keys and values of each step, while those of the next travel."""
        own = k.new_empty(k.shape[2], *row_shape(k, v))
        pack(own, k, v, slice(None))
        coming = self._bring(0, own)
        for step in range(self.work.exchange.plan.ranks):
            rows = coming.wait().permute(1, 2, 0, 3)
            if step + 1 < self.work.exchange.plan.ranks:
                coming = self._bring(step + 1, own)
            yield rows[..., : k.shape[3]], rows[..., k.shape[3] :]

    def _bring(self, step: int, own: torch.Tensor) -> Transfer:
        """The rows of a step, one run of the sender's behind another."""
        exchange = self.work.exchange
        sender, receiver = self._peers(step)
        received, sent = exchange.received[sender], exchange.sent[receiver]
        rows = own.new_empty(sum(piece.number for piece in received), *own.shape[1:])
        places = torch.split(rows, [piece.number for piece in received])
        if step == 0:
            for place, piece in zip(places, received, strict=True):
                place.copy_(own[slice(*piece.rows)])
            return Transfer(lambda: rows, [])
        works = swap(
            exchange.group,
            [(own[slice(*piece.rows)], receiver) for piece in sent],
            [(place, sender) for place in places],
        )
        return Transfer(lambda: rows, works, [own])

    def _give_back(self, step: int, rows: torch.Tensor) -> Returned:
        """Sends the gradients of a step's rows to their owner."""
        exchange = self.work.exchange
        sender, receiver = self._peers(step)
        received, sent = exchange.received[sender], exchange.sent[receiver]
        places = torch.split(rows, [piece.number for piece in received])
        if step == 0:
            own = [(piece.rows, place) for piece, place in zip(received, places, strict=True)]
            return returned(exchange.group, [], {}, own, rows)
        parcels = [(place, sender) for place in places]
        return returned(exchange.group, parcels, {receiver: sent}, [], rows)
