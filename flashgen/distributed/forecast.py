"""Forecast: what will be sent and computed of a sequence, as text and as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen.distributed.costs import Choice, Machine, Sizes, choose
from flashgen.distributed.layout import Layout
from flashgen.distributed.plan import Plan, Ranges, make_plan

#: Lines of the picture, and its columns: letters are about twice as high as wide.
LINES, COLUMNS = 32, 64

#: The letters of ranks, over and over.
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

#: The most ranks that have a line each.
LISTED = 16


@dataclass(frozen=True)
class Forecast:
    """What all ranks will send and compute of one sequence.

    Attributes:
        plan: of the ranks' queries and of the rows that they need.
        sizes: of the call.
        machine: the rates that predictions go by.
        choice: the strategy, and the costs of all.
        picture: the ranks over the mask: queries from top to bottom, keys from left to right; a
            cell in which some query sees a key has the letter of the rank of its first query.
    """

    plan: Plan
    sizes: Sizes
    machine: Machine
    choice: Choice
    picture: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self.plan.lines(LISTED)
        yield ""
        yield from self._costs()
        yield ""
        letters = LETTERS[: self.plan.ranks]
        yield f"queries from top to bottom, keys from left to right; ranks {_span(letters)}"
        yield from self.picture

    def _costs(self) -> Iterator[str]:
        hosts = -(-self.plan.ranks // self.machine.ranks_per_host)
        heads = f"{self.sizes.num_q_heads}/{self.sizes.num_kv_heads} heads"
        rates = f"{self.machine.within / 1e9:g} GB/s to GPUs of a host"
        if hosts > 1:
            rates += f", {self.machine.between / 1e9:g} between {hosts} hosts"
        yield f"predicted for batch {self.sizes.batch}, {heads}, {rates}:"
        titles = ("strategy", "forward ms", "backward ms", "of linear", "received MB", "held MB")
        rows = [
            (
                name,
                f"{1e3 * cost.forward:,.2f}",
                f"{1e3 * cost.backward:,.2f}",
                f"{cost.share:.3f}",
                f"{cost.received / 1e6:,.0f}",
                f"{cost.held / 1e6:,.0f}",
            )
            for name, cost in self.choice.costs.items()
        ]
        yield from table(titles, rows)
        for name, why in self.choice.refused.items():
            yield f"not {name}: {why}"
        yield self.choice.why


def forecast(
    module: ModuleType,
    length: int,
    layout: Layout,
    parameters: Mapping[str, Any],
    sizes: Sizes,
    machine: Machine,
    *,
    strategy: str = "auto",
    keep: bool | None = None,
    parts: int | None = None,
) -> Forecast:
    """The forecast of a sequence; no process group is needed.

    Args:
        module: a generated module with the form ``"mesh"``.
        length: of the sequence.
        layout: where its positions are.
        parameters: those that the module's ranges read.
        sizes: of the call.
        machine: rates.
        strategy: its name, or ``"auto"``.
        keep: whether rows are kept for the backward pass; None: where they are few.
        parts: groups of heads; None: as many as are best.
    """
    ranges = Ranges(module, length, length, parameters, sizes.batch, sizes.num_q_heads)
    plan = make_plan(ranges, layout, layout)
    choice = choose(strategy, module, plan, sizes, machine, keep=keep, parts=parts)
    return Forecast(plan, sizes, machine, choice, picture(ranges, layout))


def picture(
    ranges: Ranges, layout: Layout, lines: int = LINES, columns: int = COLUMNS
) -> tuple[str, ...]:
    """The ranks over the mask: see `Forecast`."""
    length = layout.length
    lines, columns = min(lines, length), min(columns, length)
    owners = torch.zeros(length, dtype=torch.int64)
    for rank, chunks in enumerate(layout.chunks):
        for begin, end in chunks:
            owners[begin:end] = rank
    found = []
    for i in range(lines):
        begin, end = i * length // lines, (i + 1) * length // lines
        letter = LETTERS[int(owners[begin]) % len(LETTERS)]
        seen = [
            any(
                first < (j + 1) * length // columns and j * length // columns < last
                for first, last in ranges.runs(begin, end, 1)
            )
            for j in range(columns)
        ]
        found.append("".join(letter if x else "." for x in seen))
    return tuple(found)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        yield "  ".join(cells).rstrip()


def _span(letters: str) -> str:
    return letters if len(letters) < 3 else f"{letters[0]} to {letters[-1]}"
