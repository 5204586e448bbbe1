"""Shares: which heads each of some ranks computes, and tensors on their way to these and back.

With fewer heads of keys than ranks, several ranks get the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen.distributed.exchange import swap
from flashgen.distributed.layout import Layout, Span
from flashgen.distributed.plan import joined

#: Tensors (batch, heads, tokens, head_dim) with the same batch entries and tokens.
Sides = Sequence[torch.Tensor]


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
    return _indivisible(num_q_heads, num_kv_heads, ranks)


def sizes_of_groups(num_q_heads: int, num_kv_heads: int, ranks: int) -> tuple[int, ...]:
    """How many ranks a group may have that divides heads, where there are several groups."""
    return tuple(
        size
        for size in range(2, ranks // 2 + 1)
        if ranks % size == 0 and not _indivisible(num_q_heads, num_kv_heads, size)
    )


def _indivisible(num_q_heads: int, num_kv_heads: int, ranks: int) -> str:
    """Why so many heads cannot be divided among so many ranks, as a clause."""
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
class Swap:
    """Ranks that give one another heads of their tokens.

    Attributes:
        group: the process group.
        numbers: their numbers in it.
        index: which of them this rank is.
        layout: the tokens of each, as positions among those of all.
    """

    group: Any
    numbers: tuple[int, ...]
    index: int
    layout: Layout

    def to_heads(self, parts: Sequence[Sides]) -> torch.Tensor:
        """Rows of all tokens, of this rank's heads: see `sides`.

        Args:
            parts: for each rank its heads of this rank's tokens.
        """
        mine = parts[self.index]
        rows = mine[0].new_empty(self.layout.length, mine[0].shape[0], _width(mine))
        own = self._runs(self.index)
        sent = [
            (_flat([x[:, :, start : start + end - begin] for x in parts[other]]), number)
            for other, number in self._others
            for (begin, end), start in own
        ]
        received = [
            (rows[slice(*run)], number)
            for other, number in self._others
            for run, _ in self._runs(other)
        ]
        works = swap(self.group, sent, received)
        for (begin, end), start in own:
            for place, x in zip(sides(rows[begin:end], mine), mine, strict=True):
                place.copy_(x[:, :, start : start + end - begin])
        for work in works:
            work.wait()
        return rows

    def to_tokens(self, mine: Sides, parts: Sequence[Sides], added: Collection[int] = ()) -> None:
        """Writes this rank's tokens of the heads of each rank.

        Args:
            mine: this rank's heads, of all tokens.
            parts: for each rank the place of its heads of this rank's tokens.
            added: which of the sides are added to what is there.
        """
        length = self.layout.lengths[self.index]
        own = self._runs(self.index)
        sent = [
            (_flat([x[:, :, slice(*run)] for x in mine]), number)
            for other, number in self._others
            for run, _ in self._runs(other)
        ]
        found = {
            other: mine[0].new_empty(length, mine[0].shape[0], _width(parts[other]))
            for other, _ in self._others
        }
        received = [
            (found[other][start : start + end - begin], number)
            for other, number in self._others
            for (begin, end), start in own
        ]
        works = swap(self.group, sent, received)

        def put(places: Sides, found: Sides) -> None:
            for number, (place, x) in enumerate(zip(places, found, strict=True)):
                if number in added:
                    place += x
                else:
                    place.copy_(x)

        for (begin, end), start in own:
            tokens = slice(start, start + end - begin)
            put([x[:, :, tokens] for x in parts[self.index]], [x[:, :, begin:end] for x in mine])
        for work in works:
            work.wait()
        for other, rows in found.items():
            put(parts[other], sides(rows, parts[other]))

    @property
    def _others(self) -> list[tuple[int, int]]:
        """The other ranks: which they are, and their numbers in the group."""
        return [(i, n) for i, n in enumerate(self.numbers) if i != self.index]

    def _runs(self, rank: int) -> list[tuple[Span, int]]:
        """The runs of a rank's positions, and where they lie in its shard; neighbours are one."""
        runs, start = [], 0
        for begin, end in joined(span for span in self.layout.chunks[rank] if span[0] < span[1]):
            runs.append(((begin, end), start))
            start += end - begin
        return runs


def sides(rows: torch.Tensor, like: Sides) -> list[torch.Tensor]:
    """The tensors (batch, heads, tokens, head_dim) in rows (tokens, batch, width) of all of them.

    Args:
        rows: the tensors side by side.
        like: tensors with as many heads and columns.
    """
    parts = torch.split(rows, [x.shape[1] * x.shape[3] for x in like], 2)
    return [
        part.view(*part.shape[:2], x.shape[1], x.shape[3]).permute(1, 2, 0, 3)
        for part, x in zip(parts, like, strict=True)
    ]


def _flat(tensors: Sides) -> torch.Tensor:
    """Rows (tokens, batch, width) of tensors, side by side."""
    rows = [x.permute(2, 0, 1, 3).flatten(2) for x in tensors]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, 2)


def _width(tensors: Sides) -> int:
    """The width of such rows."""
    return sum(x.shape[1] * x.shape[3] for x in tensors)
