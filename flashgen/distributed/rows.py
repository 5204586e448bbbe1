"""Rows: the keys that a rank's queries see come to the rank, all before its calls.

Either each rank gets just the rows that it needs, or all ranks get all rows by one all-gather.

Heads may go in groups, one after another: while a group is computed, the keys of the next travel,
and the gradients of the one before go back. No result depends on the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from flashgen.distributed.exchange import Returned
from flashgen.distributed.lanes import Lanes, Mark
from flashgen.distributed.plan import Call
from flashgen.distributed.work import Chunk, Work, in_order, unseen, wide

#: Results of both passes: tensors.
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """Both passes of a rank's queries, beside the rows of keys that they see.

    Attributes:
        work: the calls.
        parts: the number of groups of heads, all alike.
        keep: whether rows are kept for the backward pass, which otherwise asks for them again.
    """

    work: Work
    parts: int = 1
    keep: bool = False

    @cached_property
    def longest_first(self) -> tuple[Chunk, ...]:
        """The chunks of queries; those with most keys come first."""

        def keys(i: int) -> int:
            return sum(call.keys[1] - call.keys[0] for call in self.work.chunks[i][1])

        order = sorted(range(len(self.work.chunks)), key=lambda i: (-keys(i), i))
        return tuple(self.work.chunks[i] for i in order)

    @cached_property
    def most_calls(self) -> int:
        """How many calls read a row of keys, at most."""
        calls = [call for _, calls in self.work.chunks for call in calls]
        ends = [end for call in calls for end in ((call.keys[0], 1), (call.keys[1], -1))]
        most = now = 0
        for _, sign in sorted(ends):  # an end comes before a begin at the same row
            now += sign
            most = max(most, now)
        return most

    @property
    def _calls(self) -> int:
        return self.parts * sum(len(calls) for _, calls in self.work.chunks)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        """The output of this rank's queries, and what `backward` needs."""
        lanes = Lanes(q.device, self._calls)
        found: list[list[tuple[Any, list[Any]]]] = []
        kept: list[torch.Tensor] = []
        for group in self._arriving(q, k, v, ()):
            kept += [group.rows] if self.keep else []
            of_q = q[:, group.of_q]
            results = [
                (
                    span,
                    [
                        lanes.run(
                            self.work.attend, call, of_q, *group.sides, tensors, group.of_q.start
                        )
                        for call in calls
                    ],
                )
                for span, calls in self.longest_first
            ]
            found.append(results)
        lanes.join()
        outs, lses = [], []
        for results in found:
            of_q = q[:, : q.shape[1] // len(found)]
            merged = [
                (
                    span,
                    self.work.merged(each) if each else unseen(of_q[:, :, slice(*span)], v),
                )
                for span, each in results
            ]
            nothing = unseen(of_q, v) if not merged else (q, q)
            outs.append(in_order([(span, out) for span, (out, _) in merged], nothing[0]))
            lses.append(in_order([(span, lse) for span, (_, lse) in merged], nothing[1]))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        lse = lses[0] if len(lses) == 1 else torch.cat(lses, 1)
        return out, (q, k, v, out, lse, *kept)

    def backward(
        self, saved: Tensors, tensors: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""
        q, k, v, out, lse, *kept = saved
        grads = torch.empty_like(k), torch.empty_like(v)
        learned = self.work.no_learned(tensors)
        grad_q: list[torch.Tensor] = []
        lanes = Lanes(q.device, self._calls)
        going: list[tuple[slice, Returned]] = []

        def finish(group: Group) -> None:
            """Adds up what the calls of a group have found, and sends it back."""
            lanes.join(group.mark)
            sums = Sums(self, group.rows, k.shape[3])
            parts = []
            for span, calls, results in group.found:
                for call, result in zip(calls, results, strict=True):
                    sums.add(call, result[1], result[2])
                    for total, x in zip(learned, result[3:], strict=True):
                        total += x
                rows = q[:, group.of_q, slice(*span)]
                parts.append((span, _sum([result[0] for result in results], rows)))
            grad_q.append(in_order(parts, q[:, group.of_q]))
            exchange = self.work.exchange
            going.append((group.of_k, exchange.give_back(sums.total())))
            if len(going) > 1:  # those of the group before have had the time of this one
                take(*going.pop(0))

        def take(of_k: slice, returned: Returned) -> None:
            returned.add_to(grads[0][:, of_k], grads[1][:, of_k])

        before: Group | None = None
        for group in self._arriving(q, k, v, kept):
            of_q = q[:, group.of_q]
            # All copies come first: they would wait for the SMs of the first call.
            given = []
            for span, calls in self.longest_first:
                rows = slice(None), group.of_q, slice(*span)
                mine = out[rows].contiguous(), lse[rows].contiguous(), grad_out[rows]
                given.append((span, calls, mine))
            first = group.of_q.start
            for span, calls, mine in given:
                results = [
                    lanes.run(self.work.gradients, call, of_q, *group.sides, mine, tensors, first)
                    for call in calls
                ]
                group.found.append((span, calls, results))
            group.mark = lanes.mark()
            # What the group before has found is added up while this one is computed.
            if before is not None:
                finish(before)
            before = group
        if before is not None:
            finish(before)
        for each in going:
            take(*each)
        of_q = grad_q[0] if len(grad_q) == 1 else torch.cat(grad_q, 1)
        return (of_q, *grads), learned

    def _arriving(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Sequence[torch.Tensor]
    ) -> Iterator[Group]:
        """The groups of heads, while the rows of the next travel."""
        ends = [i * k.shape[1] // self.parts for i in range(self.parts + 1)]
        times = q.shape[1] // k.shape[1]
        heads = [
            (slice(begin * times, end * times), slice(begin, end)) for begin, end in pairwise(ends)
        ]
        if kept:
            for (of_q, of_k), rows in zip(heads, kept, strict=True):
                yield Group(of_q, of_k, rows, k.shape[3])
            return
        bring = self.work.exchange.bring
        coming = [bring(k[:, of_k], v[:, of_k]) for _, of_k in heads[:2]]
        for number, (of_q, of_k) in enumerate(heads):
            rows = coming.pop(0).wait()
            if number + 2 < len(heads):
                after = heads[number + 2][1]
                coming.append(bring(k[:, after], v[:, after]))
            yield Group(of_q, of_k, rows, k.shape[3])


@dataclass(eq=False)
class Group:
    """A group of heads, whose rows are there.

    Attributes:
        of_q: its heads of queries.
        of_k: its heads of keys.
        rows: its keys and values, (rows, batch, heads, both head_dims).
        width: the head_dim of keys.
        found: for each chunk of queries its run, its calls, and the gradients of these.
        mark: of its calls.
    """

    of_q: slice
    of_k: slice
    rows: torch.Tensor
    width: int
    found: list[tuple[Any, tuple[Call, ...], list[Tensors]]] = field(default_factory=list)
    mark: Mark = field(default_factory=lambda: ([], []))

    @property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (batch, heads, rows, head_dim)."""
        rows = self.rows.permute(1, 2, 0, 3)
        return rows[..., : self.width], rows[..., self.width :]


def _sum(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A sum in float32 and in order, in the dtype of a tensor; of no numbers it is zeros."""
    if not parts:
        return torch.zeros_like(like)
    first, *others = parts
    if not others:
        return first
    dtype = wide(first.dtype)
    return sum((x.to(dtype) for x in others), first.to(dtype)).to(like.dtype)


class Sums:
    """The gradients of the rows that a rank needs, over its calls, in float32.

    Two numbers of 16 bits have one sum in 16 bits, whether it was rounded once or from float32. So
    where a row is in two calls at most, the sums are in the dtype of the keys.
    """

    def __init__(self, rows: Rows, like: torch.Tensor, width: int) -> None:
        self._dtype, self._width = like.dtype, width
        dtype = wide(like.dtype) if rows.most_calls > 2 else like.dtype
        # The first call is the longest: often all rows are in it.
        self._empty = bool(rows.longest_first) and any(
            call.keys == (0, len(like)) for call in rows.longest_first[0][1][:1]
        )
        made = torch.empty if self._empty else torch.zeros
        self._sums = made(like.shape, dtype=dtype, device=like.device)

    def add(self, call: Call, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Adds the gradients of a call's keys and values."""
        rows = self._sums[slice(*call.keys)]
        parts = (rows[..., : self._width], grad_k), (rows[..., self._width :], grad_v)
        for total, x in parts:
            if self._empty:
                total.copy_(x.permute(2, 0, 1, 3))
            else:
                total += x.permute(2, 0, 1, 3)
        self._empty = False

    def total(self) -> torch.Tensor:
        """The sums, in the keys' dtype."""
        return self._sums.to(self._dtype)
