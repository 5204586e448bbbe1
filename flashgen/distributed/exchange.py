"""Exchange: rows of keys to the ranks that need them, and their gradients back.

A row is a position: the keys and the values of all batch entries and heads, side by side, so that a
run of rows is one block of memory. It is sent from where the sender keeps it and arrives at its
place, and a module reads keys and values in it through strides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist

from flashgen.distributed.layout import Span
from flashgen.distributed.plan import Piece, Plan

#: A tensor, and the rank that it goes to or comes from.
Parcel = tuple[torch.Tensor, int]


def swap(group: Any, sent: Sequence[Parcel], received: Sequence[Parcel]) -> list[Any]:
    """Starts to send tensors to ranks of a group, and to receive others into their places.

    Args:
        group: the ranks.
        sent: contiguous tensors; those for one rank in the order in which it receives them.
        received: likewise.

    Returns:
        What to wait for.
    """
    operations = []
    for start, parcels in ((dist.isend, sent), (dist.irecv, received)):
        numbers: dict[int, int] = {}
        for tensor, rank in parcels:
            if tensor.numel() == 0:
                continue
            tag = numbers[rank] = numbers.get(rank, -1) + 1
            peer = dist.get_global_rank(group, rank)
            operations.append(dist.P2POp(start, tensor, peer, group, tag))
    return dist.batch_isend_irecv(operations) if operations else []


@dataclass(eq=False)
class Transfer:
    """Tensors on their way.

    Attributes:
        arrived: what makes of them what was asked for.
        works: what to wait for.
        sent: what has to live until then.
    """

    arrived: Callable[[], Any]
    works: list[Any]
    sent: Sequence[torch.Tensor] = ()

    def wait(self) -> Any:
        """What was asked for, when all of it has arrived."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], ()
        return self.arrived()


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows that one rank sends and receives by a plan.

    Attributes:
        plan: of all ranks.
        rank: this one's number in the plan.
        group: a process group.
        peers: the numbers in it of the plan's ranks; none: all of its ranks, in the plan's order.
    """

    plan: Plan
    rank: int
    group: Any
    peers: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> str:
        """What tells plans apart."""
        return hashlib.sha256(repr((self.plan.queries, self.plan.runs)).encode()).hexdigest()

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the group of the plan's ranks."""
        return self.peers or tuple(range(self.plan.ranks))

    @cached_property
    def sent(self) -> tuple[tuple[Piece, ...], ...]:
        """For each rank the rows that it gets from this one."""
        return tuple(self.plan.pieces(self.rank, r) for r in range(self.plan.ranks))

    @cached_property
    def received(self) -> tuple[tuple[Piece, ...], ...]:
        """For each rank the rows that this one gets from it."""
        return tuple(self.plan.pieces(r, self.rank) for r in range(self.plan.ranks))

    @cached_property
    def rows(self) -> int:
        """The rows that this rank needs."""
        return self.plan.rows(self.rank)

    def bring(self, k: torch.Tensor, v: torch.Tensor) -> Transfer:
        """Sends this rank's rows, and receives those that it needs.

        Args:
            k: this rank's keys, (batch, heads, rows, head_dim).
            v: its values, likewise.

        Returns:
            The transfer of (rows, batch, heads, both head_dims), by ascending positions.
        """
        rows = k.new_empty(self.rows, *row_shape(k, v))
        for piece in self.received[self.rank]:
            pack(rows[slice(*piece.places)], k, v, slice(*piece.rows))
        sent = []
        for rank, pieces in self._others(self.sent):
            number = self.numbers[rank]
            sent += [(self._own(rows, k, v, piece.rows), number) for piece in pieces]
        received = [
            (rows[slice(*piece.places)], self.numbers[rank])
            for rank, pieces in self._others(self.received)
            for piece in pieces
        ]
        return Transfer(lambda: rows, swap(self.group, sent, received), [x for x, _ in sent])

    def give_back(self, grads: torch.Tensor) -> Returned:
        """Sends gradients of the rows to the ranks that they came from.

        Args:
            grads: of the needed rows, in the shape of `bring`'s.
        """
        sent = [
            (grads[slice(*piece.places)], self.numbers[rank])
            for rank, pieces in self._others(self.received)
            for piece in pieces
        ]
        own = [(piece.rows, grads[slice(*piece.places)]) for piece in self.received[self.rank]]
        pieces = {self.numbers[rank]: mine for rank, mine in self._others(self.sent)}
        return returned(self.group, sent, pieces, own, grads)

    def _own(self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Span) -> torch.Tensor:
        """A run of this rank's rows: a view of those that it needs itself, if they are."""
        for piece in self.received[self.rank]:
            if piece.rows[0] <= own[0] and own[1] <= piece.rows[1]:
                place = piece.places[0] - piece.rows[0]
                return rows[own[0] + place : own[1] + place]
        packed = k.new_empty(own[1] - own[0], *row_shape(k, v))
        pack(packed, k, v, slice(*own))
        return packed

    def _others(self, pieces: Sequence[Sequence[Piece]]) -> Iterator[tuple[int, Sequence[Piece]]]:
        return ((rank, mine) for rank, mine in enumerate(pieces) if rank != self.rank)


def returned(
    group: Any,
    sent: Sequence[Parcel],
    pieces: Mapping[int, Sequence[Piece]],
    own: Sequence[tuple[Span, torch.Tensor]],
    like: torch.Tensor,
) -> Returned:
    """Sends gradients of rows to their owners, and receives those of this rank's rows.

    Args:
        group: the ranks.
        sent: gradients, and the ranks that have the rows.
        pieces: for other ranks the runs of this rank's rows whose gradients they send.
        own: gradients that it has itself, and the runs of its rows that they are of.
        like: a tensor of gradients of rows, for dtype and device.
    """
    runs = sorted((piece.rows, r) for r, mine in pieces.items() for piece in mine)
    parts = [(run, part[None]) for run, part in own]
    parcels: list[Parcel] = []
    for run, of_run in groupby(runs, key=lambda found: found[0]):
        ranks = [r for _, r in of_run]
        stack = like.new_empty(len(ranks), run[1] - run[0], *like.shape[1:])
        parcels += zip(stack, ranks, strict=True)
        parts.append((run, stack))
    works = swap(group, sent, parcels)
    return Returned(parts, works, [x for x, _ in sent])


@dataclass(eq=False)
class Returned:
    """Gradients on their way back.

    Attributes:
        parts: runs of this rank's rows, and what several ranks have found of the gradients of their
            keys and values: (ranks, rows, batch, heads, both head_dims).
        works: what to wait for.
        sent: what has to live until then.
    """

    parts: list[tuple[Span, torch.Tensor]]
    works: list[Any]
    sent: list[torch.Tensor]

    def add_to(self, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Writes their sums, added in float32 and in a fixed order.

        Args:
            grad_k: of this rank's keys, (batch, heads, rows, head_dim).
            grad_v: of its values, likewise.
        """
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        width = grad_k.shape[3]
        sides = (
            (grad_k.permute(2, 0, 1, 3), slice(None, width)),
            (grad_v.permute(2, 0, 1, 3), slice(width, None)),
        )
        ends = {end for run, _ in self.parts for end in run} | {0, grad_k.shape[2]}
        for begin, end in pairwise(sorted(ends)):
            parts = [
                part[:, begin - run[0] : end - run[0]]
                for run, part in self.parts
                if run[0] <= begin and end <= run[1]
            ]
            for total, columns in sides:
                _add(total[begin:end], [part[..., columns] for part in parts])
        self.parts = []


def _add(total: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Writes the sum over the first dimension of all parts, in float32 and rounded once.

    Two numbers of 16 bits have one sum in 16 bits, whether it is rounded once or from float32.
    """
    if not parts:
        total.zero_()
    elif sum(map(len, parts)) <= 2:
        first, *second = (x for part in parts for x in part)
        total.copy_(first) if not second else torch.add(first, second[0], out=total)
    else:
        dtype = torch.promote_types(total.dtype, torch.float32)
        first, *others = (part.sum(0, dtype=dtype) for part in parts)
        for other in others:
            first += other
        total.copy_(first)


def row_shape(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    """The shape of a row: batch entries, heads, and both head_dims."""
    return k.shape[0], k.shape[1], k.shape[3] + v.shape[3]


def pack(out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice) -> None:
    """Copies rows of keys and values side by side."""
    width = k.shape[3]
    out[..., :width] = k[:, :, rows].permute(2, 0, 1, 3)
    out[..., width:] = v[:, :, rows].permute(2, 0, 1, 3)
