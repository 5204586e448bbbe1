"""Layout: which positions of a sequence are on which rank.

A sequence is cut into chunks of equal numbers of tokens, as many for each rank: the rest of a model
costs the same for each token. Which chunks a rank has is decided by what their queries cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

#: A run of positions: the first, and that behind the last.
Span = tuple[int, int]

#: A rank's work over the mean, up to which a layout is even.
EVEN = 1.02

#: Of fewer positions each is tried as a cut, of others every eighth.
FINE, STEP = 1 << 14, 8

#: A cost that no cut has.
NEVER = 1 << 60


@dataclass(frozen=True)
class Layout:
    """Where the positions of a sequence are.

    Attributes:
        length: of the whole sequence.
        chunks: for each rank, its runs of positions in ascending order. Its shard has these, one
            after another.
    """

    length: int
    chunks: tuple[tuple[Span, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.chunks)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The positions on each rank."""
        return tuple(sum(end - begin for begin, end in chunks) for chunks in self.chunks)

    def starts(self, rank: int) -> tuple[int, ...]:
        """Where each chunk of a rank begins in its shard."""
        sizes = (end - begin for begin, end in self.chunks[rank])
        return tuple(accumulate(sizes, initial=0))[:-1]

    def positions(self, rank: int) -> torch.Tensor:
        """The position of each token of a rank's shard, int64."""
        runs = [torch.arange(begin, end) for begin, end in self.chunks[rank]]
        return torch.cat([torch.arange(0), *runs])


def contiguous(length: int, ranks: int, align: int = 1) -> Layout:
    """One chunk for each rank, in their order; chunks begin at multiples of ``align``."""
    return Layout(length, tuple((span,) for span in _cut(length, ranks, align)))


def zigzag(length: int, ranks: int, align: int = 1) -> Layout:
    """Two chunks for each rank: the first and the last, the second and the last but one, ..."""
    spans = _cut(length, 2 * ranks, align)
    return Layout(length, tuple((spans[i], spans[-1 - i]) for i in range(ranks)))


def imbalance(layout: Layout, cost: Callable[[int, int], int]) -> float:
    """The cost of the most loaded rank over the mean; 1.0 where nothing costs anything."""
    costs = [sum(cost(*span) for span in chunks) for chunks in layout.chunks]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0


def balanced(
    length: int, ranks: int, cost: Callable[[int, int], int], chunks: int, align: int = 1
) -> Layout:
    """So many chunks for each rank, which share the cost evenly.

    By falling cost, each goes to the least loaded rank that has room for one more.

    Args:
        length: of the sequence.
        ranks: their number.
        cost: of the queries from one position to before another.
        chunks: of each rank.
        align: chunks begin at multiples of it.
    """
    spans = _cut(length, ranks * chunks, align)
    costs = [cost(*span) for span in spans]
    loads = [0] * ranks
    given: list[list[Span]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(spans)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(given[r]) < chunks), key=lambda r: (loads[r], r))
        given[rank].append(spans[i])
        loads[rank] += costs[i]
    return Layout(length, tuple(sorted(tuple(sorted(mine)) for mine in given)))


def halved(
    length: int, ranks: int, costs: torch.Tensor, crossed: torch.Tensor, align: int = 1
) -> Layout:
    """Few runs of positions for each rank, which share the cost evenly.

    The sequence is divided between two halves of the ranks: one gets a window of it, the other what
    is left, at either end. Windows as long as half of the sequence cost as much as half of it on
    average, and moving one by a position changes its cost by little, so that some window has the
    mean. The halves are divided likewise. So there are less than two cuts for each rank.

    Args:
        length: of the sequence.
        ranks: their number.
        costs: of each query, int64.
        crossed: for each position, what it costs to cut before it, int64.
        align: runs begin at multiples of it.
    """
    sizes = [end - begin for begin, end in _cut(length, ranks, align)]
    every = [*_runs([(0, length)])]
    return Layout(length, tuple(sorted(_halves(every, sizes, costs, crossed, align))))


def _halves(
    spans: list[Span], sizes: list[int], costs: torch.Tensor, crossed: torch.Tensor, align: int
) -> Iterator[tuple[Span, ...]]:
    """The runs of each of some ranks, which get these spans."""
    if len(sizes) == 1 or not spans:
        yield from (tuple(spans) or ((0, 0),),) * len(sizes)
        return
    half = len(sizes) // 2
    number, window = sum(sizes), sum(sizes[:half])
    of_spans = torch.cat([costs[begin:end] for begin, end in spans])
    of_cuts = torch.cat([crossed[begin:end] for begin, end in spans])
    of_cuts = torch.cat([of_cuts, of_cuts.new_zeros(1)])
    of_cuts[0] = 0
    sums = torch.cat([of_spans.new_zeros(1), of_spans.cumsum(0)])
    # A window that goes past the end begins again at the front: the others have one in the middle.
    begins = torch.arange(0, number, align if number < FINE else STEP * align)
    ends = begins + window
    past = ends > number
    ends = torch.where(past, ends - number, ends)
    found = sums[ends] - sums[begins] + past * sums[-1]
    off = (found * len(sizes) - sums[-1] * half).abs() // len(sizes)
    worst = torch.where(ends % align == 0, 0, NEVER)
    best = int((off + of_cuts[begins] + of_cuts[ends] + worst).argmin())
    first, last = sorted((int(begins[best]), int(ends[best])))
    middle = _taken(spans, first, last)
    outside = [*_taken(spans, 0, first), *_taken(spans, last, number)]
    mine, others = (outside, middle) if bool(past[best]) else (middle, outside)
    yield from _halves([*_runs(mine)], sizes[:half], costs, crossed, align)
    yield from _halves([*_runs(others)], sizes[half:], costs, crossed, align)


def _taken(spans: list[Span], first: int, last: int) -> Iterator[Span]:
    """The spans of those positions that come at places from one to before another."""
    start = 0
    for begin, end in spans:
        low, high = max(first, start), min(last, start + end - begin)
        if low < high:
            yield begin + low - start, begin + high - start
        start += end - begin


def _runs(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans in ascending order, of which those that follow one another are one."""
    last: Span | None = None
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if last is not None and last[1] == begin:
            last = last[0], end
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


def within(layout: Layout, first: int, ranks: int) -> Layout:
    """Where the positions of some ranks are among those of these ranks alone.

    Args:
        layout: of all ranks.
        first: the first of the ranks.
        ranks: how many follow one another.
    """
    every = layout.chunks[first : first + ranks]
    spans = sorted(span for mine in every for span in mine)
    starts = accumulate((end - begin for begin, end in spans), initial=0)
    places = dict(zip(spans, starts, strict=False))
    return Layout(
        sum(end - begin for begin, end in spans),
        tuple(
            tuple((places[span], places[span] + span[1] - span[0]) for span in mine)
            for mine in every
        ),
    )


def _cut(length: int, parts: int, align: int = 1) -> list[Span]:
    """Spans of lengths that are equal or differ by ``align``, but for the last one."""
    ends = (i * length // parts + align // 2 for i in range(1, parts))
    return list(pairwise([0, *(min(end - end % align, length) for end in ends), length]))
