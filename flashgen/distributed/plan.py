"""Plan: what each rank computes, and which rows of keys it needs from whom.

The ranges that a module publishes say which keys each query sees. A chunk of queries needs, for
each run of keys of its module, those from the first that one of its queries sees to the last. So a
rank computes its queries in calls, each of a chunk of queries and a run of keys, and needs the
union of these runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from flashgen.distributed.layout import Layout, Span, balanced, contiguous, zigzag

#: Runs of keys with fewer keys between them become one: a call more takes longer.
GAP = 512


@dataclass(frozen=True)
class Call:
    """A call of a module: some of a rank's queries, and a run of keys.

    Attributes:
        queries: the run of the rank's shard.
        q_offset: the position of the first of them.
        keys: the run of the rows that the rank needs.
        kv_offset: the position of the first of them.
    """

    queries: Span
    q_offset: int
    keys: Span
    kv_offset: int


@dataclass(frozen=True)
class Piece:
    """Rows that one rank sends another.

    Attributes:
        rows: the run of the sender's shard.
        places: the run of the rows that the receiver needs.
    """

    rows: Span
    places: Span

    @property
    def number(self) -> int:
        """How many there are."""
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Plan:
    """What all ranks send and compute of one sequence.

    Attributes:
        queries: where the queries are.
        keys: where the keys are.
        needed: for each rank, the runs of positions of the keys that it needs, in ascending order.
        runs: for each rank and each of its chunks of queries, the runs of keys that it sees.
        pairs: for each rank, the pairs of a query and a key within the module's ranges.
        loose: whether the ranges hold keys that no query sees, as where only data knows them.
    """

    queries: Layout
    keys: Layout
    needed: tuple[tuple[Span, ...], ...]
    runs: tuple[tuple[tuple[Span, ...], ...], ...]
    pairs: tuple[int, ...]
    loose: bool

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.queries.ranks

    def rows(self, rank: int) -> int:
        """How many rows of keys a rank needs, its own included."""
        return sum(end - begin for begin, end in self.needed[rank])

    def received(self, rank: int) -> int:
        """How many of them it gets from other ranks."""
        return sum(
            piece.number for s in range(self.ranks) if s != rank for piece in self.pieces(s, rank)
        )

    def pieces(self, sender: int, receiver: int) -> tuple[Piece, ...]:
        """The rows that a rank sends another, or keeps, in ascending order."""
        found = []
        places = accumulate((end - begin for begin, end in self.needed[receiver]), initial=0)
        for (first, last), place in zip(self.needed[receiver], places, strict=False):
            starts = self.keys.starts(sender)
            for (begin, end), start in zip(self.keys.chunks[sender], starts, strict=True):
                low, high = max(first, begin), min(last, end)
                if low < high:
                    rows = start + low - begin, start + high - begin
                    found.append(Piece(rows, (place + low - first, place + high - first)))
        return tuple(sorted(found, key=lambda piece: piece.rows))

    def calls(self, rank: int) -> tuple[tuple[Call, ...], ...]:
        """The calls for each of a rank's chunks of queries, by ascending keys."""
        starts = self.queries.starts(rank)
        chunks = zip(self.queries.chunks[rank], starts, self.runs[rank], strict=True)
        return tuple(
            tuple(
                Call((start, start + end - begin), begin, self._places(rank, run), run[0])
                for run in runs
            )
            for (begin, end), start, runs in chunks
        )

    def _places(self, rank: int, run: Span) -> Span:
        """A run of positions within the rows that a rank needs."""
        place = 0
        for begin, end in self.needed[rank]:
            if begin <= run[0] < end:
                return place + run[0] - begin, place + run[1] - begin
            place += end - begin
        raise AssertionError(f"rank {rank} does not need the keys {run}")

    @cached_property
    def imbalance(self) -> float:
        """The pairs of the most loaded rank over the mean."""
        return max(self.pairs) * self.ranks / sum(self.pairs) if sum(self.pairs) else 1.0

    def __str__(self) -> str:
        """A table of the ranks: what each has, receives and computes."""
        mean = max(1, sum(self.pairs)) / self.ranks
        titles = ("rank", "queries", "chunks", "keys", "received", "calls", "pairs", "of the mean")
        rows = [
            (
                f"{rank}",
                f"{self.queries.lengths[rank]:,}",
                f"{len(self.queries.chunks[rank])}",
                f"{self.rows(rank):,}",
                f"{self.received(rank):,}",
                f"{sum(map(len, self.calls(rank)))}",
                f"{self.pairs[rank]:,}",
                f"{self.pairs[rank] / mean:.3f}",
            )
            for rank in range(self.ranks)
        ]
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (titles, *rows)
        ]
        first = (
            f"{self.queries.length:,} queries and {self.keys.length:,} keys on {self.ranks} ranks"
        )
        lines = [first, *lines, f"the most loaded rank has {self.imbalance:.3f} of the mean"]
        if self.loose:
            lines.append("conditions of the mask hide further keys of these runs")
        return "\n".join(lines)


class Ranges:
    """What the ranges of a module say of a whole: the runs of some queries, and their pairs."""

    def __init__(
        self,
        module: ModuleType,
        q_len: int,
        kv_len: int,
        parameters: Mapping[str, Any],
        batch: int = 1,
        num_q_heads: int = 1,
    ) -> None:
        facts = module.MESH
        read = {name: parameters[name] for name in facts["of_runs"] if name in parameters}
        found = module.visible_runs(q_len, kv_len, batch=batch, num_q_heads=num_q_heads, **read)
        self._merges = facts["merges"]
        self._align = alignment(module)
        self.kv_len = kv_len
        self.loose = not facts["exact"]
        counts = _union(found)
        per_query = counts.sum((0, 1)) // counts[..., 0].numel() if q_len else counts.sum((0, 1))
        self._pairs = torch.cat([torch.zeros(1, dtype=torch.int64), per_query.cumsum(0)])
        # For each query, over batch entries and heads, the first and the last key of each run.
        self._ends = [
            (
                torch.where(begin < end, begin, kv_len).amin((0, 1)),
                torch.where(begin < end, end, 0).amax((0, 1)),
            )
            for begin, end in found
        ]

    def pairs(self, begin: int, end: int) -> int:
        """The pairs of the queries from one position to before another, of one head."""
        return int(self._pairs[end] - self._pairs[begin])

    def runs(self, begin: int, end: int) -> tuple[Span, ...]:
        """The runs of keys of these queries, with at least `GAP` keys between them."""
        if begin == end:
            return ()
        ends = (
            (int(first[begin:end].min()), int(last[begin:end].max())) for first, last in self._ends
        )
        spans = [(first - first % self._align, last) for first, last in ends if first < last]
        return tuple(joined(spans, GAP if self._merges else self.kv_len + 1))


def make_plan(ranges: Ranges, queries: Layout, keys: Layout) -> Plan:
    """The plan of a whole in given layouts."""
    runs = tuple(tuple(ranges.runs(*chunk) for chunk in chunks) for chunks in queries.chunks)
    return Plan(
        queries=queries,
        keys=keys,
        needed=tuple(tuple(joined([run for runs in mine for run in runs])) for mine in runs),
        runs=runs,
        pairs=tuple(sum(ranges.pairs(*chunk) for chunk in chunks) for chunks in queries.chunks),
        loose=ranges.loose,
    )


def make_layout(
    length: int,
    ranks: int,
    balance: str | int,
    cost: Callable[[int, int], int],
    align: int = 1,
) -> Layout:
    """The layout that ``balance`` asks for: see `context_parallel`."""
    if balance == "contiguous":
        return contiguous(length, ranks, align)
    if balance == "zigzag":
        return zigzag(length, ranks, align)
    return balanced(length, ranks, cost, balance if isinstance(balance, int) else None, align)


def alignment(module: ModuleType) -> int:
    """What parts of a module's calls begin at multiples of: 1, but for dropout."""
    align: int = module.MESH.get("align", 1)
    return align


def joined(spans: Iterable[Span], gap: int = 1) -> Iterator[Span]:
    """Spans in ascending order; those with fewer than ``gap`` positions between them become one."""
    last: Span | None = None
    for begin, end in sorted(spans):
        if last is not None and begin - last[1] < gap:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


def _union(runs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """How many keys each query sees in runs that may overlap."""
    begins, ends = zip(*runs, strict=True)
    sizes = zip(*(x.shape for x in (*begins, *ends)), strict=True)
    shape = [max(size) if min(size) else 0 for size in sizes]
    begin, order = torch.stack([x.expand(shape) for x in begins]).sort(0)
    end = torch.stack([x.expand(shape) for x in ends]).gather(0, order)
    before = torch.cat([torch.zeros_like(end[:1]), end.cummax(0).values[:-1]])
    return (end - torch.maximum(begin, before)).clamp_min(0).sum(0)
