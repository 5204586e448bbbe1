"""Makes docs/visited.md: for 60 masks, the tiles that kernels visit beside those that are needed.

    python -m docs.make_visited    writes it

Counted on numbers: the tiles by the derived bounds or lists, what is needed by the mask's own
function. Where a kernel decides tiles, its lists hold what is needed: tests compare its answers
with every element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from docs.mask_list import LENGTH, MASKS, Listed
from flashgen.explain.picture import SKIPPED, UNMASKED, picture
from flashgen.plan.classified import bounds_are_too_wide
from flashgen.reference import visibility
from flashgen.symbolic import (
    RangeTable,
    RowTable,
    TileBounds,
    derive_bounds,
    derive_q_bounds,
    trace,
)
from flashgen.symbolic.tile_logic import tile_logic
from flashgen.symbols import evaluate

PAGE = Path(__file__).parent / "visited.md"

#: Queries and keys of a tile.
BLOCK = 128

INTRODUCTION = f"""\
# Visited tiles

For the masks of [mask_list.py](mask_list.py) at {LENGTH} tokens, in tiles of {BLOCK} x {BLOCK}: the
tiles that a kernel visits, over those that hold a visible pair; and, of the tiles in which all
pairs are visible, the share that is not masked. First for the keys of a tile of queries, then for
the queries of a tile of keys, as the backward kernels over keys go. 1.00 of both is the least work.
A star marks masks whose tiles a kernel [decides](design/tiles.md) on the device, since only the
data knows them or since bounds visit too much; the last columns show what bounds alone would visit
of these, as in other forms than the dense one. This page is made by `python -m docs.make_visited`,
and a test holds it to what is derived.
"""


@dataclass(frozen=True)
class Counts:
    """Tiles of one direction.

    Attributes:
        visited: by the bounds.
        needed: with a visible pair.
        unmasked: visited without a mask.
        full: all of whose pairs are visible.
    """

    visited: int
    needed: int
    unmasked: int
    full: int

    @property
    def ratio(self) -> float:
        """Visited over needed."""
        return self.visited / self.needed

    @property
    def exact(self) -> Counts:
        """Those of lists that a kernel makes by elements."""
        return Counts(self.needed, self.needed, self.full, self.full)

    @property
    def minimal(self) -> bool:
        """Whether nothing is visited, or masked, for nothing."""
        return self.visited <= 1.05 * self.needed and self.unmasked == self.full

    def __str__(self) -> str:
        full = "" if not self.full else f"{self.unmasked / self.full:.2f}"
        return f"{self.ratio:.2f} | {full}"


class Elements:
    """An array as a kernel reads it: 0 outside."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape = self.array.shape

    def __getitem__(self, index: tuple[int, ...]) -> Any:
        inside = all(0 <= i < n for i, n in zip(index, self.shape, strict=True))
        return self.array[index].item() if inside else 0


def counted(listed: Listed) -> tuple[Counts, Counts]:
    """The tiles of both directions.

    Raises:
        ValueError: a tile is skipped that holds a visible pair, or not masked for all its hidden.
    """
    params = listed.params
    values = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in params.items()}
    seen = visibility(listed.mask, 1, 1, LENGTH, LENGTH, params=values)
    seen = seen.expand(1, 1, LENGTH, LENGTH)[0, 0].numpy()
    in_tiles = seen.reshape(LENGTH // BLOCK, BLOCK, LENGTH // BLOCK, BLOCK)
    some, every = in_tiles.any((1, 3)), in_tiles.all((1, 3))
    predicate = trace(listed.mask)
    logic = tile_logic(predicate)
    if logic is not None:
        at = _values(params, logic.row_tables)
        rows = picture(logic, LENGTH, LENGTH, BLOCK, BLOCK, at).rows
        kinds = np.array([list(row) for row in rows])
        both = _checked(kinds != SKIPPED, kinds == UNMASKED, some, every)
        return both, both
    forward = derive_bounds(predicate, ranges=True)
    backward = derive_q_bounds(predicate, ranges=True)
    return (
        _checked(*_tiles(forward, params, "q"), some, every),
        _checked(*_tiles(backward, params, "kv"), some.T, every.T),
    )


def _checked(visited: Any, unmasked: Any, some: Any, every: Any) -> Counts:
    if (some & ~visited).any() or (unmasked & ~every).any():
        raise ValueError("a visible pair is skipped, or a hidden one not masked")
    return Counts(int(visited.sum()), int(some.sum()), int(unmasked.sum()), int(every.sum()))


def _tiles(bounds: TileBounds, params: Mapping[str, Any], side: str) -> tuple[Any, Any]:
    """Whether a tile is visited, and whether it is not masked: a row for each tile of ``side``."""
    tiles = LENGTH // BLOCK
    visited, unmasked = (np.zeros((tiles, tiles), dtype=bool) for _ in range(2))
    values = _values(params, bounds.tables)
    values |= {table.name: Elements(_range(table, params)) for table in bounds.ranges}
    values |= {"q_len": LENGTH, "kv_len": LENGTH, "b": 0, "h": 0}
    for i in range(tiles):
        ends = {f"{side}_first": BLOCK * i, f"{side}_last": BLOCK * i + BLOCK - 1}
        for run in bounds.intervals:
            *edges, holds = (evaluate(x, {**values, **ends}) for x in run.expressions)
            begin, end, full_begin, full_end = edges
            if holds and begin < end:
                visited[i, begin // BLOCK : -(-end // BLOCK)] = True
                # A tile is not masked if one of the runs says that all see it.
                unmasked[i, -(-full_begin // BLOCK) : full_end // BLOCK] = True
    return visited, unmasked


def _values(params: Mapping[str, Any], tables: tuple[RowTable, ...]) -> dict[str, Any]:
    """The parameters, and the tables that the launcher makes of them, as kernels read them."""
    made = {
        table.name: np.searchsorted(
            params[table.keys.name][0], params[table.values.name], table.side
        )
        for table in tables
        if table.side != "unordered"
    }
    found = {**params, **made}
    return {k: Elements(v) if isinstance(v, np.ndarray) else v for k, v in found.items()}


def _range(table: RangeTable, params: Mapping[str, Any]) -> Any:
    """What the launcher makes of a tensor of one dimension, or of two with a batch of one."""
    keys = params[table.keys.name]
    shown = ((keys >= table.low) & (keys <= table.high)) != table.but
    (at,) = shown.reshape(-1).nonzero()
    first, end = at[0], at[-1] + 1
    gaps = np.flatnonzero(np.diff(at) > 1)
    runs = ((first, at[gaps[0]] + 1), (at[gaps[-1] + 1], end)) if len(gaps) else ((first, end),)
    longest = max(runs, key=lambda run: run[1] - run[0])
    return np.array([first, end, *longest]).reshape(*keys.shape[:-1], 4)


def page() -> str:
    """The text of the page."""
    rows, minimal = [], 0
    for name, listed in MASKS.items():
        forward, backward = counted(listed)
        star, bounds = "", " | "
        predicate = trace(listed.mask)
        if tile_logic(predicate) is None and bounds_are_too_wide(predicate):
            star, bounds = " *", f"{forward.ratio:.2f} | {backward.ratio:.2f}"
            forward, backward = forward.exact, backward.exact
        minimal += forward.minimal and backward.minimal
        rows.append(f"| {name.replace('_', ' ')}{star} | {forward} | {backward} | {bounds} |")
    titles = ("mask", "keys", "unmasked", "queries", "unmasked", "bounds: keys", "queries")
    head = f"| {' | '.join(titles)} |\n| --- |{' ---: |' * 6}\n"
    total = (
        f"\n{minimal} of {len(MASKS)} masks visit at most 1.05 of what they need both ways, "
        "with all full tiles unmasked.\n\n"
    )
    return INTRODUCTION + total + head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
