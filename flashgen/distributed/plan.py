"""Plan: what each rank computes, and which rows of keys it needs from whom.

The ranges that a module publishes say which keys each query sees. A chunk of queries needs, for
each run of keys of its module, those from the first that one of its queries sees to the last. So a
rank computes its queries in calls, each of a chunk of queries and a run of keys, and needs the
union of these runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from flashgen.distributed.layout import (
    EVEN,
    Layout,
    Span,
    balanced,
    contiguous,
    halved,
    imbalance,
    zigzag,
)

#: The pairs of a head that take as long as a row of keys that another rank sends, there and back:
#: on H100s joined by NVLink, with four heads of queries for each of keys.
OF_A_ROW = 340

#: Those that take as long as what a further call costs by itself.
OF_A_CALL = 500_000

#: Those that take as long as putting a query of several chunks together: output and gradient.
OF_A_QUERY = 200

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
        return int(self.traffic[:, rank].sum() - self.traffic[rank, rank])

    @cached_property
    def traffic(self) -> torch.Tensor:
        """The rows that each rank sends each, or keeps: int64, (senders, receivers)."""
        chunks = [(*span, r) for r, mine in enumerate(self.keys.chunks) for span in mine]
        begins, ends, owners = torch.tensor(chunks, dtype=torch.int64).reshape(-1, 3).unbind(1)
        found = torch.zeros(self.ranks, self.ranks, dtype=torch.int64)
        for receiver, spans in enumerate(self.needed):
            for first, last in spans:
                seen = (ends.clamp(max=last) - begins.clamp(min=first)).clamp(min=0)
                found[:, receiver].index_add_(0, owners, seen)
        return found

    def pieces(self, sender: int, receiver: int) -> tuple[Piece, ...]:
        """The rows that a rank sends another, or keeps, in ascending order."""
        known = self._pieces.get((sender, receiver))
        if known is None:
            known = self._pieces[sender, receiver] = tuple(self._found_pieces(sender, receiver))
        return known

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[Piece, ...]]:
        return {}

    def _found_pieces(self, sender: int, receiver: int) -> Iterator[Piece]:
        """Those, in which neighbours are one piece."""
        last: Piece | None = None
        for piece, _ in self._cut_pieces(sender, receiver):
            if last is not None and (last.rows[1], last.places[1]) == (
                piece.rows[0],
                piece.places[0],
            ):
                rows, places = (last.rows[0], piece.rows[1]), (last.places[0], piece.places[1])
                last = Piece(rows, places)
                continue
            if last is not None:
                yield last
            last = piece
        if last is not None:
            yield last

    def _cut_pieces(self, sender: int, receiver: int) -> list[tuple[Piece, int]]:
        """The rows of each chunk of the sender in each run that the receiver needs.

        In the sender's order, each with the position of its first row.
        """
        found = []
        places = accumulate((end - begin for begin, end in self.needed[receiver]), initial=0)
        starts = self.keys.starts(sender)
        for (first, last), place in zip(self.needed[receiver], places, strict=False):
            for (begin, end), start in zip(self.keys.chunks[sender], starts, strict=True):
                low, high = max(first, begin), min(last, end)
                if low < high:
                    rows = start + low - begin, start + high - begin
                    piece = Piece(rows, (place + low - first, place + high - first))
                    found.append((piece, low))
        return sorted(found, key=lambda each: each[0].rows)

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

    def calls_between(self, sender: int, receiver: int) -> Iterator[tuple[Span, tuple[Call, ...]]]:
        """The calls of each chunk of a rank's queries with the rows of one rank, if it has some.

        The rows are those of `pieces`, one piece behind another; a call has a run of them whose
        positions follow one another.
        """
        runs = list(self._positions(sender, receiver))
        starts = self.queries.starts(receiver)
        chunks = zip(self.queries.chunks[receiver], starts, self.runs[receiver], strict=True)
        for (begin, end), start, seen in chunks:
            calls = []
            for place, first, last in runs:
                for low, high in seen:
                    low, high = max(low, first), min(high, last)
                    if low < high:
                        keys = place + low - first, place + high - first
                        calls.append(Call((start, start + end - begin), begin, keys, low))
            if calls:
                yield (start, start + end - begin), tuple(calls)

    def _positions(self, sender: int, receiver: int) -> Iterator[tuple[int, int, int]]:
        """Where runs of positions lie in the rows of `pieces`, and the positions."""
        place = 0
        run: tuple[int, int, int] | None = None
        for piece, first in self._cut_pieces(sender, receiver):
            end = first + piece.number
            if run is not None and run[2] == first:
                run = *run[:2], end
            else:
                if run is not None:
                    yield run
                run = place, first, end
            place += piece.number
        if run is not None:
            yield run

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
        return "\n".join(self.lines())

    def lines(self, listed: int | None = None) -> Iterator[str]:
        """A table of the ranks: what each has, receives and computes.

        Args:
            listed: of how many ranks at most, from the first on; None: of all.
        """
        mean = max(1, sum(self.pairs)) / self.ranks
        titles = ("rank", "queries", "chunks", "keys", "received", "calls", "pairs", "of the mean")
        shown = range(self.ranks)[:listed]
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
            for rank in shown
        ]
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        yield f"{self.queries.length:,} queries and {self.keys.length:,} keys on {self.ranks} ranks"
        for row in (titles, *rows):
            yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        if len(shown) < self.ranks:
            yield f"and {self.ranks - len(shown)} further ranks"
        yield f"the most loaded rank has {self.imbalance:.3f} of the mean"
        if self.loose:
            yield "conditions of the mask hide further keys of these runs"


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
        self.align = alignment(module)
        self.kv_len = kv_len
        self.loose = not facts["exact"]
        counts = _union(found)
        per_query = counts.sum((0, 1)) // counts[..., 0].numel() if q_len else counts.sum((0, 1))
        #: The pairs of each query, of one head.
        self.per_query = per_query
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

    @property
    def crossed(self) -> torch.Tensor:
        """For each position the keys before it that a query behind sees, from the first of them."""
        first, *others = (first for first, _ in self._ends)
        for other in others:
            first = torch.minimum(first, other)
        positions = torch.arange(len(first))
        return (positions - first.flip(0).cummin(0).values.flip(0)).clamp(min=0)

    def runs(self, begin: int, end: int, gap: int | None = None) -> tuple[Span, ...]:
        """The runs of keys of these queries, with at least `GAP` keys between them, or others."""
        if begin == end:
            return ()
        ends = (
            (int(first[begin:end].min()), int(last[begin:end].max())) for first, last in self._ends
        )
        spans = [(first - first % self.align, last) for first, last in ends if first < last]
        least = GAP if self._merges else self.kv_len + 1
        return tuple(joined(spans, least if gap is None else gap))


def with_every_row(plan: Plan) -> Plan:
    """A plan whose ranks compute the same, but get all rows."""
    every = tuple(joined([(0, plan.keys.length)] if plan.keys.length else []))
    return replace(plan, needed=(every,) * plan.ranks)


def plan_of_groups(plan: Plan, ranks: int, merges: bool) -> Plan:
    """The plan in which groups of so many ranks, beside one another, are one rank each.

    Chunks that follow one another are one, and so are their runs of keys with fewer than `GAP` keys
    between them.

    Args:
        plan: of the ranks.
        ranks: how many a group has.
        merges: whether results of several runs can be merged.
    """
    gap = GAP if merges else plan.keys.length + 1
    chunks, runs = [], []
    for first in range(0, plan.ranks, ranks):
        members = range(first, first + ranks)
        mine = {
            span: seen
            for r in members
            for span, seen in zip(plan.queries.chunks[r], plan.runs[r], strict=True)
            if span[0] < span[1]
        }
        chunks.append(tuple(joined(mine)))
        runs.append(
            tuple(
                tuple(
                    joined(
                        (
                            run
                            for span, seen in mine.items()
                            if begin <= span[0] < end
                            for run in seen
                        ),
                        gap,
                    )
                )
                for begin, end in chunks[-1]
            )
        )
    layout = Layout(plan.queries.length, tuple(chunks))
    return Plan(
        queries=layout,
        keys=layout,
        needed=tuple(tuple(joined(run for seen in mine for run in seen)) for mine in runs),
        runs=tuple(runs),
        pairs=tuple(sum(plan.pairs[i : i + ranks]) for i in range(0, plan.ranks, ranks)),
        loose=plan.loose,
    )


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


def make_layout(ranges: Ranges, ranks: int, balance: str | int) -> Layout:
    """The layout that ``balance`` asks for: see `context_parallel`."""
    length, cost, align = ranges.kv_len, ranges.pairs, ranges.align
    if balance == "contiguous":
        return contiguous(length, ranks, align)
    if balance == "zigzag":
        return zigzag(length, ranks, align)
    if isinstance(balance, int):
        return balanced(length, ranks, cost, balance, align)
    whole = contiguous(length, ranks, align)
    if imbalance(whole, cost) <= EVEN:
        return whole
    crossed = OF_A_ROW * ranges.crossed
    few = halved(length, ranks, ranges.per_query, torch.zeros_like(crossed), align)
    near = halved(length, ranks, ranges.per_query, crossed, align)  # ends of documents, say
    evens = few, *([near] if imbalance(near, cost) < EVEN else [])
    loads = {layout: _load(make_plan(ranges, layout, layout)) for layout in (whole, *evens)}
    even = min(evens, key=loads.__getitem__)  # of equals the first
    return whole if EVEN * loads[whole] < loads[even] else even


def _load(plan: Plan) -> int:
    """The work of the most loaded rank, in pairs."""
    return max(
        plan.pairs[r]
        + OF_A_ROW * plan.received(r)
        + OF_A_CALL * sum(len(runs) for runs in plan.runs[r])
        + OF_A_QUERY * plan.queries.lengths[r] * (len(plan.queries.chunks[r]) > 1)
        for r in range(plan.ranks)
    )


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
