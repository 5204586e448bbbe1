"""The runs of keys that a query tile visits, and the loops over them, as source text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashgen.symbolic.intervals import KvInterval
from flashgen.symbolic.printer import triton_source

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
class TileLoop:
    """A loop over key tiles ``[begin, end)``, both names or numbers in the kernel."""

    begin: str
    end: str
    masked: bool


def print_interval(
    interval: KvInterval,
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


def loops_over(interval: PrintedInterval) -> tuple[TileLoop, ...]:
    """The loops over one run of keys: masked head, full middle, masked tail."""
    s = interval.suffix
    full_begin = "0" if interval.starts_full and not s else f"full_begin{s}"
    middle_and_tail = (
        TileLoop(full_begin, f"full_end{s}", masked=False),
        TileLoop(f"full_end{s}", f"kv_end{s}", masked=True),
    )
    if interval.starts_full and not s:
        return middle_and_tail
    return (TileLoop(f"kv_begin{s}", f"full_begin{s}", masked=True), *middle_and_tail)
