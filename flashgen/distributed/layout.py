"""Layout: which positions of a sequence are on which rank.

A sequence is cut into chunks of equal numbers of tokens, as many for each rank: the rest of a model
costs the same for each token. Which chunks a rank has is decided by what their queries cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

#: A run of positions: the first, and that behind the last.
Span = tuple[int, int]

#: Queries of a tile: chunks are not cut smaller to balance them.
TILE = 128

#: A rank's work over the mean, from which on more chunks are tried.
EVEN = 1.02

#: The most chunks that a rank gets.
MOST_CHUNKS = 16


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


def evener(
    length: int, ranks: int, cost: Callable[[int, int], int], align: int = 1
) -> Iterator[Layout]:
    """Layouts with 1, 2, 4... chunks for each rank, each more even than those before.

    Until the most loaded rank is within 2% of the mean, or the chunks are one tile. They begin at
    multiples of ``align``.
    """
    layout = contiguous(length, ranks, align)
    least = imbalance(layout, cost)
    yield layout
    number = 2
    while least > EVEN and number <= MOST_CHUNKS and length >= TILE * ranks * number:
        layout = balanced(length, ranks, cost, number, align)
        if (found := imbalance(layout, cost)) < least:
            least = found
            yield layout
        number *= 2


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
