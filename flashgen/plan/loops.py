"""The key tiles that a query tile visits, as a kernel finds them."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.promise import Promise
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code
from flashgen.symbols import Q_LAST, FloorDiv, Load, RowMax, RowMin

# What the batch and head of a traced predicate are called inside the kernel.
KERNEL_NAMES = {"b": "batch", "h": "head"}


@dataclass(frozen=True)
class Run:
    """One run of keys that a query tile visits, in element positions.

    Attributes:
        begin, end: columns that some row of the tile sees.
        full_begin, full_end: columns that every row of the tile sees.
        condition: when the run exists at all; None where always.
        can_be_empty: whether ``end`` may lie at or before a ``begin`` other than 0.
        starts_full: whether the run begins at key 0 and needs no mask there.
        suffix: what tells its variables apart: ``""`` where there is one run, else ``"_0"``...
    """

    begin: Code
    end: Code
    full_begin: Code
    full_end: Code
    condition: Code | None
    can_be_empty: bool
    starts_full: bool
    suffix: str

    @property
    def codes(self) -> tuple[Code | None, ...]:
        """What is computed of it."""
        return (self.begin, self.end, self.full_begin, self.full_end, self.condition)


@dataclass(frozen=True)
class KeyTiles:
    """The key tiles that a query tile visits.

    Attributes:
        runs: they may overlap.
        sorted: whether they come in the order of their first keys.
        uneven: whether some query tiles have more of them to visit than others.
        read_q_last: whether they depend on the last query of the tile.
        reduce_rows: whether they are those of an extreme over the tile's rows.
        listed: whether the tiles come from a list that another kernel has made, not from `runs`.
        separated: whether those of the list that need no mask come before the others.
        unordered: where this holds, all of them are visited, and all masked: what `runs` trust is
            not so. None where they trust nothing.
    """

    runs: tuple[Run, ...]
    sorted: bool
    uneven: bool
    read_q_last: bool
    reduce_rows: bool
    listed: bool
    separated: bool
    unordered: Code | None

    @property
    def from_key_0(self) -> bool:
        """Whether the one run begins at key 0 and needs no mask there."""
        return len(self.runs) == 1 and self.runs[0].starts_full


def key_tiles(
    bounds: TileBounds,
    promise: Promise | None = None,
    *,
    listed: bool = False,
    separated: bool = False,
) -> KeyTiles:
    """What bounds say. With ``listed`` the kernel has a list of tiles in their place.

    With ``separated`` the tiles of that list which need no mask come first.
    """
    several = len(bounds.intervals) > 1
    runs = tuple(
        _run(interval, f"_{i}" if several else "") for i, interval in enumerate(bounds.intervals)
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
        separated=separated,
        unordered=None if promise is None else triton_code(promise.broken, KERNEL_NAMES),
    )


def _run(interval: Interval, suffix: str) -> Run:
    begin, end, full_begin, full_end, condition = (
        triton_code(expr, KERNEL_NAMES) for expr in interval.expressions
    )
    return Run(
        begin=begin,
        end=end,
        full_begin=full_begin,
        full_end=full_end,
        condition=None if interval.condition == True else condition,  # noqa: E712
        can_be_empty=not (interval.begin == 0 or interval.nonempty),
        starts_full=bool(interval.begin == 0 and interval.full_begin == 0),
        suffix=suffix,
    )
