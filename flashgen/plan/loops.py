"""The key tiles that a query tile visits, as source text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashgen.plan.promise import Promise
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.printer import triton_source
from flashgen.symbols import Q_LAST, FloorDiv, Load, RowMax, RowMin

# What the batch and head of a traced predicate are called inside the kernel.
KERNEL_NAMES = {"b": "batch", "h": "head"}


@dataclass(frozen=True)
class PrintedInterval:
    """One run of keys that a query tile visits, as source text in element positions.

    Attributes:
        begin, end: columns that some row of the tile sees.
        full_begin, full_end: columns that every row of the tile sees.
        condition: when the run exists at all; ``""`` where always.
        can_be_empty: whether ``end`` may lie at or before a ``begin`` other than 0.
        starts_full: whether the run begins at key 0 and needs no mask there.
        suffix: what tells its variables apart: ``""`` where there is one run, else ``"_0"``...
    """

    begin: str
    end: str
    full_begin: str
    full_end: str
    condition: str
    can_be_empty: bool
    starts_full: bool
    suffix: str


@dataclass(frozen=True)
class KeyTiles:
    """The key tiles that a query tile visits.

    Attributes:
        runs: as text; they may overlap.
        sorted: whether they come in the order of their first keys.
        uneven: whether some query tiles have more of them to visit than others.
        read_q_last: whether they depend on the last query of the tile.
        reduce_rows: whether they are those of an extreme over the tile's rows.
        listed: whether the tiles come from a list that another kernel has made, not from `runs`.
        unordered: where this holds, all of them are visited, and all masked: what `runs` trust is
            not so. ``""`` where they trust nothing.
    """

    runs: tuple[PrintedInterval, ...]
    sorted: bool
    uneven: bool
    read_q_last: bool
    reduce_rows: bool
    listed: bool
    unordered: str

    @property
    def from_key_0(self) -> bool:
        """Whether the one run begins at key 0 and needs no mask there."""
        return len(self.runs) == 1 and self.runs[0].starts_full


def key_tiles(
    bounds: TileBounds, promise: Promise | None = None, *, listed: bool = False
) -> KeyTiles:
    """The bounds as text. With ``listed`` the kernel has a list of tiles in their place."""
    several = len(bounds.intervals) > 1
    runs = tuple(
        print_interval(interval, f"_{i}" if several else "")
        for i, interval in enumerate(bounds.intervals)
    )
    exprs = [expr for interval in bounds.intervals for expr in interval.expressions]
    # The ends of a window move with the tile; those of chunks and documents stay behind.
    stepwise = any(expr.has(FloorDiv, Load) for expr in exprs)
    return KeyTiles(
        runs=runs,
        sorted=bounds.sorted or listed,
        uneven=stepwise or listed or bounds.longest_first != "even",
        read_q_last=not listed and any(Q_LAST in expr.free_symbols for expr in exprs),
        reduce_rows=not listed and any(expr.has(RowMin, RowMax) for expr in exprs),
        listed=listed,
        unordered="" if promise is None else triton_source(promise.broken, KERNEL_NAMES),
    )


def print_interval(
    interval: Interval,
    suffix: str = "",
    text: Callable[[Any], str] = lambda expr: triton_source(expr, KERNEL_NAMES),
) -> PrintedInterval:
    """The interval as text, for the kernel or as ``text`` prints it."""
    return PrintedInterval(
        begin=text(interval.begin),
        end=text(interval.end),
        full_begin=text(interval.full_begin),
        full_end=text(interval.full_end),
        condition="" if interval.condition == True else text(interval.condition),  # noqa: E712
        can_be_empty=not (interval.begin == 0 or interval.nonempty),
        starts_full=bool(interval.begin == 0 and interval.full_begin == 0),
        suffix=suffix,
    )
