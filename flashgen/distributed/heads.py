"""Heads: each rank computes some heads of the whole sequence, as Ulysses does.

Queries, keys and values go to the ranks of their heads, outputs come back, and likewise with
gradients. With fewer heads of keys than ranks, several ranks get the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch

from flashgen.distributed.exchange import Parcel, swap
from flashgen.distributed.layout import Layout, Span
from flashgen.distributed.plan import Call, joined
from flashgen.distributed.work import Work, wide

#: Results of both passes: tensors.
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Share:
    """The heads of one rank: slices of those of queries, and of those of keys."""

    of_q: slice
    of_k: slice


def shares(num_q_heads: int, num_kv_heads: int, ranks: int) -> tuple[Share, ...]:
    """The heads of each rank: see `why_not`."""
    each, group = num_q_heads // ranks, num_q_heads // num_kv_heads
    return tuple(
        Share(
            slice(rank * each, (rank + 1) * each),
            slice(rank * each // group, -(-(rank + 1) * each // group)),
        )
        for rank in range(ranks)
    )


def why_not(module: ModuleType, num_q_heads: int, num_kv_heads: int, ranks: int) -> str:
    """Why heads cannot be divided among ranks, as a clause; ``""`` where they can."""
    if module.MESH["by_head"]:
        return "mask, score or sink differ between heads"
    if num_q_heads % ranks:
        return f"{num_q_heads} heads of queries are no multiple of {ranks} ranks"
    each, group = num_q_heads // ranks, num_q_heads // max(1, num_kv_heads)
    if each % group and group % each:
        return (
            f"the {each} heads of queries of a rank belong to parts of groups of {group}, "
            "which share keys"
        )
    return ""


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
        divided = shares(q.shape[1], k.shape[1], self._ranks)
        mine = divided[self._rank]
        whole = self._to_heads([_flat(q[:, s.of_q], k[:, s.of_k], v[:, s.of_k]) for s in divided])
        seen_q, seen_k, seen_v = _sides(whole, q[:, mine.of_q], k[:, mine.of_k], v[:, mine.of_k])
        result, lse = self.work.attend(self._call, seen_q, seen_k, seen_v, tensors, mine.of_q.start)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        outs = [out[:, share.of_q] for share in divided]
        for mine_of, rows in zip(
            outs, self._to_tokens(_flat(result), map(_width, outs)), strict=True
        ):
            mine_of.copy_(_sides(rows, mine_of)[0])
        return out, (q, k, v, whole, result, lse)

    def backward(
        self, saved: Tensors, tensors: Sequence[torch.Tensor], grad_out: torch.Tensor
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """The gradients of this rank's q, k and v, and its part of those of learned tensors."""
        q, k, v, whole, result, lse = saved
        divided = shares(q.shape[1], k.shape[1], self._ranks)
        mine = divided[self._rank]
        seen_q, seen_k, seen_v = _sides(whole, q[:, mine.of_q], k[:, mine.of_k], v[:, mine.of_k])
        grads_out = self._to_heads([_flat(grad_out[:, share.of_q]) for share in divided])
        [of_out] = _sides(grads_out, result)
        saved_of_call = result, lse, of_out
        of_q, of_k, of_v, *learned = self.work.gradients(
            self._call, seen_q, seen_k, seen_v, saved_of_call, tensors, mine.of_q.start
        )
        grads = [torch.empty_like(q)]
        # Heads of keys that several ranks have are added up.
        shared = any(after.of_k.start < mine.of_k.stop for mine, after in pairwise(divided))
        for x in (k, v):
            dtype = wide(x.dtype) if shared else x.dtype
            grads.append(torch.zeros(x.shape, dtype=dtype, device=x.device))
        parts = [
            (grads[0][:, share.of_q], grads[1][:, share.of_k], grads[2][:, share.of_k])
            for share in divided
        ]
        widths = (_width(*part) for part in parts)
        for part, rows in zip(parts, self._to_tokens(_flat(of_q, of_k, of_v), widths), strict=True):
            for number, (total, x) in enumerate(zip(part, _sides(rows, *part), strict=True)):
                if number and shared:
                    total += x
                else:
                    total.copy_(x)
        return (grads[0], grads[1].to(k.dtype), grads[2].to(v.dtype)), learned

    @property
    def _rank(self) -> int:
        return self.work.exchange.rank

    @property
    def _ranks(self) -> int:
        return self.work.exchange.plan.ranks

    @property
    def _layout(self) -> Layout:
        return self.work.exchange.plan.queries

    @property
    def _call(self) -> Call:
        """All queries and all keys."""
        every = 0, self._layout.length
        return Call(every, 0, every, 0)

    def _to_heads(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of all positions, of this rank's heads.

        Args:
            parts: rows of this rank's tokens, of the heads of each rank.
        """
        own = parts[self._rank]
        whole = own.new_empty(self._layout.length, *own.shape[1:])
        runs = [_runs(self._layout, rank) for rank in range(self._ranks)]
        for (begin, end), start in runs[self._rank]:
            whole[begin:end] = own[start : start + end - begin]
        sent = [
            (parts[rank][start : start + end - begin], rank)
            for rank in self._others
            for (begin, end), start in runs[self._rank]
        ]
        received = [(whole[slice(*run)], rank) for rank in self._others for run, _ in runs[rank]]
        self._swap(sent, received)
        return whole

    def _to_tokens(self, rows: torch.Tensor, widths: Iterable[int]) -> list[torch.Tensor]:
        """Rows of this rank's tokens, of the heads of each rank.

        Args:
            rows: of all positions, of this rank's heads.
            widths: of the rows of each rank's heads.
        """
        length = self._layout.lengths[self._rank]
        runs = [_runs(self._layout, rank) for rank in range(self._ranks)]
        parts = [rows.new_empty(length, rows.shape[1], width) for width in widths]
        for (begin, end), start in runs[self._rank]:
            parts[self._rank][start : start + end - begin] = rows[begin:end]
        sent = [(rows[slice(*run)], rank) for rank in self._others for run, _ in runs[rank]]
        received = [
            (parts[rank][start : start + end - begin], rank)
            for rank in self._others
            for (begin, end), start in runs[self._rank]
        ]
        self._swap(sent, received)
        return parts

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def _swap(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        for work in swap(self.work.exchange.group, sent, received):
            work.wait()


def _runs(layout: Layout, rank: int) -> list[tuple[Span, int]]:
    """The runs of a rank's positions, and where they lie in its shard; neighbours are one."""
    runs, start = [], 0
    for begin, end in joined(span for span in layout.chunks[rank] if span[0] < span[1]):
        runs.append(((begin, end), start))
        start += end - begin
    return runs


def _flat(*sides: torch.Tensor) -> torch.Tensor:
    """Rows (tokens, batch, width) of tensors (batch, heads, tokens, head_dim), side by side."""
    rows = [x.permute(2, 0, 1, 3).flatten(2) for x in sides]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, 2)


def _width(*sides: torch.Tensor) -> int:
    """The width of such rows."""
    return sum(x.shape[1] * x.shape[3] for x in sides)


def _sides(rows: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    """The tensors (batch, heads, tokens, head_dim) in rows, which have the heads of others."""
    parts = torch.split(rows, [_width(x) for x in like], 2)
    return [
        part.view(*part.shape[:2], x.shape[1], x.shape[3]).permute(1, 2, 0, 3)
        for part, x in zip(parts, like, strict=True)
    ]
