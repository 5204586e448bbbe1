"""Exchange: rows of keys to the ranks that need them, and their gradients back.

A row is a position: the keys and the values of all batch entries and heads, side by side, so that a
run of rows is one block of memory, and a module reads keys and values through strides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from flashgen.distributed.layout import Span
from flashgen.distributed.plan import Piece, Plan


@dataclass(frozen=True, eq=False)
class Exchange:
    """The rows that one rank sends and receives by a plan.

    Attributes:
        plan: of all ranks.
        rank: this one's number in the group.
        group: the ranks, in the plan's order.
        direct: whether each piece goes by a send and a receive of its own, straight to its place;
            else all go by one all-to-all, and rows are put in order afterwards.
    """

    plan: Plan
    rank: int
    group: Any
    direct: bool = False

    @cached_property
    def digest(self) -> str:
        """What tells plans apart."""
        return hashlib.sha256(repr((self.plan.queries, self.plan.runs)).encode()).hexdigest()

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

    @cached_property
    def _order(self) -> tuple[Span, ...] | None:
        """The places of rows in the order of their senders; None if that is ascending."""
        places = [piece.places for pieces in self.received for piece in pieces]
        return None if places == sorted(places) else tuple(places)

    def bring(self, k: torch.Tensor, v: torch.Tensor) -> Transfer:
        """Sends this rank's rows, and receives those that it needs.

        Args:
            k: this rank's keys, (batch, heads, rows, head_dim).
            v: its values, likewise.

        Returns:
            The transfer, of (rows, batch, heads, both head_dims).
        """
        batch, heads, _, width = k.shape
        shape = batch, heads, width + v.shape[3]
        if self.direct:
            own = k.new_empty(k.shape[2], *shape)
            _pack(own, k, v, slice(None))
            rows = k.new_empty(self.rows, *shape)
            for piece in self.received[self.rank]:
                rows[slice(*piece.places)] = own[slice(*piece.rows)]
            ends = (
                [(own[slice(*p.rows)], r) for r, pieces in enumerate(self.sent) for p in pieces],
                [
                    (rows[slice(*p.places)], r)
                    for r, pieces in enumerate(self.received)
                    for p in pieces
                ],
            )
            return Transfer(rows, self._swap(*ends), own)
        out = k.new_empty(sum(map(_number, self.sent)), *shape)
        at = 0
        for pieces in self.sent:
            for piece in pieces:
                _pack(out[at : at + piece.number], k, v, slice(*piece.rows))
                at += piece.number
        into = k.new_empty(self.rows, *shape)
        work = self._all_to_all(into, out, self.received, self.sent)
        return Transfer(into, [work], out, self._order)

    def give_back(self, grads: torch.Tensor) -> Returned:
        """Sends gradients of the rows to the ranks that they came from.

        Args:
            grads: of the needed rows, in the shape of `bring`'s.
        """
        shape = grads.shape[1:]
        into = grads.new_empty(sum(map(_number, self.sent)), *shape)
        if self.direct:
            ends = [], []  # type: tuple[list[Any], list[Any]]
            at = 0
            for rank, pieces in enumerate(self.sent):
                for piece in pieces:
                    part = into[at : at + piece.number]
                    at += piece.number
                    ends[1].append((part, rank))
                    if rank == self.rank:
                        part.copy_(grads[slice(*piece.places)])
            for rank, pieces in enumerate(self.received):
                ends[0].extend((grads[slice(*piece.places)], rank) for piece in pieces)
            return Returned(self.sent, into, self._swap(*ends), grads)
        out = grads
        if self._order is not None:
            out = torch.cat([grads[begin:end] for begin, end in self._order])
        work = self._all_to_all(into, out, self.sent, self.received)
        return Returned(self.sent, into, [work], out)

    def _all_to_all(
        self,
        into: torch.Tensor,
        out: torch.Tensor,
        received: Sequence[Sequence[Piece]],
        sent: Sequence[Sequence[Piece]],
    ) -> Any:
        return dist.all_to_all_single(
            into,
            out,
            list(map(_number, received)),
            list(map(_number, sent)),
            group=self.group,
            async_op=True,
        )

    def _swap(
        self, sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]
    ) -> list[Any]:
        """Starts a send of each part to its rank, and a receive of each from its rank."""
        operations = []
        for start, parts in ((dist.isend, sent), (dist.irecv, received)):
            tags = [0] * self.plan.ranks
            for part, rank in parts:
                if rank == self.rank:
                    continue
                peer = dist.get_global_rank(self.group, rank)
                operations.append(dist.P2POp(start, part, peer, self.group, tags[rank]))
                tags[rank] += 1
        return dist.batch_isend_irecv(operations) if operations else []


@dataclass(eq=False)
class Transfer:
    """Rows on their way.

    Attributes:
        rows: where they arrive.
        works: what to wait for.
        sent: what has to live until then.
        order: the place of each run of rows; None where they arrive in order.
    """

    rows: torch.Tensor
    works: list[Any]
    sent: torch.Tensor | None
    order: tuple[Span, ...] | None = None

    def wait(self) -> torch.Tensor:
        """The rows, in ascending order of their positions."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        if self.order is not None:
            placed = torch.empty_like(self.rows)
            at = 0
            for begin, end in self.order:
                placed[begin:end] = self.rows[at : at + end - begin]
                at += end - begin
            self.rows, self.order = placed, None
        return self.rows


@dataclass(eq=False)
class Returned:
    """Gradients on their way back.

    Attributes:
        pieces: for each rank, the rows whose gradients it sends.
        parts: where they arrive.
        works: what to wait for.
        sent: what has to live until then.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    parts: torch.Tensor
    works: list[Any]
    sent: torch.Tensor | None

    def add_to(self, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
        """Adds them to gradients of zeros, in float32 and in the order of the ranks.

        Args:
            grad_k: of this rank's keys, (batch, heads, rows, head_dim).
            grad_v: of its values, likewise.
        """
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        dtype = torch.promote_types(self.parts.dtype, torch.float32)
        total = self.parts.new_zeros(grad_k.shape[2], *self.parts.shape[1:], dtype=dtype)
        at = 0
        for pieces in self.pieces:
            for piece in pieces:
                total[slice(*piece.rows)] += self.parts[at : at + piece.number]
                at += piece.number
        width = grad_k.shape[3]
        grad_k.copy_(total[..., :width].permute(1, 2, 0, 3))
        grad_v.copy_(total[..., width:].permute(1, 2, 0, 3))


def _number(pieces: Sequence[Piece]) -> int:
    return sum(piece.number for piece in pieces)


def _pack(out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice) -> None:
    """Copies rows of keys and values side by side."""
    width = k.shape[3]
    out[..., :width] = k[:, :, rows].permute(2, 0, 1, 3)
    out[..., width:] = v[:, :, rows].permute(2, 0, 1, 3)
