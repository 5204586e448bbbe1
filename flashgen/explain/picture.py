"""A picture of the kernel's tiles of queries and keys: skipped, masked or unmasked.

A row of the picture is a tile of queries, with a character for each tile of keys: skipped, masked
or unmasked. The first head of the first sequence stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import isqrt
from typing import Any

from flashgen.budget.traffic import Visit, Workload, tile_runs
from flashgen.config import KernelConfig
from flashgen.errors import FlashgenError
from flashgen.explain.decided import decided_tiles
from flashgen.explain.numbers import python_function
from flashgen.plan import KernelPlan
from flashgen.symbolic import TileBounds
from flashgen.symbolic.blocks import BLOCK_COLUMN, BLOCK_ROW
from flashgen.symbolic.tile_answers import TILE
from flashgen.symbolic.tile_logic import TileLogic, tile_logic
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_FIRST, KV_LAST, Q_FIRST, Q_LAST

Values = Mapping[str, Any]

#: What tells which tiles a kernel visits.
Derived = TileBounds | TileLogic | Predicate

#: A picture of this many tiles takes some seconds; where tiles are listed one by one, a picture of
#: this many pairs of a query and a key does.
MOST_TILES, MOST_LISTED_PAIRS = 2**28, 2**34

#: The kinds of tiles.
_TILE = (Q_FIRST, Q_LAST, KV_FIRST, KV_LAST)

SKIPPED, MASKED, UNMASKED = ".", "x", "#"

#: The kind of a masked tile without a visible element, where elements have been evaluated.
FOR_NOTHING = "!"

KINDS: Mapping[str, str] = {
    SKIPPED: "skipped",
    MASKED: "masked",
    FOR_NOTHING: "for nothing",
    UNMASKED: "unmasked",
}


@dataclass(frozen=True)
class Picture:
    """Tiles, or cells of several tiles, from the first query down and from the first key across.

    Attributes:
        q_len, kv_len: queries and keys of the picture.
        block_m, block_n: queries and keys of a cell; the last ones may have fewer.
        rows: a string for each row, with a key of `KINDS` for each cell.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    rows: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """The number of cells of each of `KINDS`, by name."""
        return Counter(
            {name: sum(row.count(kind) for row in self.rows) for kind, name in KINDS.items()}
        )

    @property
    def visits(self) -> tuple[Visit, ...]:
        """For each row, the numbers of cells that are visited without and with the mask."""
        return tuple(
            Visit(row.count(UNMASKED), row.count(MASKED) + row.count(FOR_NOTHING))
            for row in self.rows
        )

    def scaled(self, most_rows: int, most_columns: int) -> Picture:
        """The picture in at most so many cells, of several tiles each.

        A cell is masked if one of its tiles is, else unmasked if one is, else skipped.
        """
        down = -(-len(self.rows) // most_rows)
        across = -(-len(self.rows[0]) // most_columns)
        if down <= 1 and across <= 1:
            return self
        cells = tuple(
            "".join(
                _together("".join(row[j : j + across] for row in band))
                for j in range(0, len(self.rows[0]), across)
            )
            for i in range(0, len(self.rows), down)
            for band in [self.rows[i : i + down]]
        )
        block_m, block_n = self.block_m * down, self.block_n * across
        return Picture(self.q_len, self.kv_len, block_m, block_n, cells)


def _together(tiles: str) -> str:
    return next(kind for kind in (MASKED, FOR_NOTHING, UNMASKED, SKIPPED) if kind in tiles)


def picture_of(
    plan: KernelPlan, work: Workload, config: KernelConfig, heads_of_a_tile: int = 1
) -> Picture:
    """The tiles of a kernel with this configuration, whose rows belong to so many heads.

    Raises:
        FlashgenError: more tiles than can be evaluated in a few seconds.
    """
    derived: Derived = tile_logic(plan.predicate) or plan.bounds  # the former of block tables
    if plan.classifies:
        derived = plan.predicate
    blocks = (config.BLOCK_M // heads_of_a_tile, config.BLOCK_N)
    listed = not isinstance(derived, TileBounds)
    _refuse_more(MOST_LISTED_PAIRS if listed else MOST_TILES * blocks[0] * blocks[1], work, blocks)
    heads = {"num_q_heads": work.num_q_heads, "num_kv_heads": work.num_kv_heads}
    return picture(derived, work.q_len, work.kv_len, *blocks, {**dict(work.params), **heads})


def _refuse_more(pairs: int, work: Workload, blocks: tuple[int, int]) -> None:
    """Refuses a call with more than so many pairs of a query and a key."""
    if work.q_len * work.kv_len <= pairs:
        return
    shorter, longer = sorted((work.q_len, work.kv_len))
    option = "--q-len" if work.q_len == longer else "--kv-len"
    most = isqrt(pairs) if shorter == longer else pairs // shorter
    raise FlashgenError(
        f"{option}={longer}: in tiles of {blocks[0]} x {blocks[1]} too many to look at; "
        f"write {option}={most} or less"
    )


def picture(
    derived: Derived,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    values: Values,
) -> Picture:
    """The tiles of the first head of the first sequence.

    Args:
        derived: the bounds of a loop, or the logic by which a kernel lists tiles, or a mask whose
            tiles a kernel decides.
        q_len: queries.
        kv_len: keys.
        block_m: queries of a tile.
        block_n: keys of a tile.
        values: values of parameters, row tables and constants; a tensor's value gives its elements
            for tuples of indices, 0 outside.
    """
    fixed = {**values, "q_len": q_len, "kv_len": kv_len, "b": 0, "h": 0}
    if isinstance(derived, Predicate):
        row = _by_data(derived, fixed)
    elif isinstance(derived, TileBounds):
        row = _by_bounds(derived, fixed)
    else:
        row = _by_list(derived, fixed)
    ends = [(first, min(first + block_m, q_len) - 1) for first in range(0, q_len, block_m)]
    rows = tuple(row(first, last, block_n) for first, last in ends)
    return Picture(q_len, kv_len, block_m, block_n, rows)


def _by_bounds(bounds: TileBounds, values: Values) -> Callable[[int, int, int], str]:
    """A row of tiles of keys, as a loop over the derived runs visits them."""

    def row(q_first: int, q_last: int, block: int) -> str:
        at = {**values, "q_first": q_first, "q_last": q_last}
        kinds = [SKIPPED] * -(-at["kv_len"] // block)
        for run in tile_runs(bounds, at, block):
            kinds[run.begin : run.end] = MASKED * (run.end - run.begin)
            kinds[run.full_begin : run.full_end] = UNMASKED * (run.full_end - run.full_begin)
        return "".join(kinds)

    return row


def _by_list(logic: TileLogic, values: Values) -> Callable[[int, int, int], str]:
    """A row of tiles, as a kernel lists them by block tables."""
    tables = [named.table for named in logic.tables]
    shown = [symbol for named in logic.tables for symbol in (named.some, named.every)]
    touched = [python_function(_TILE, (*table.rows, *table.columns), values) for table in tables]
    entries = [
        python_function((BLOCK_ROW, BLOCK_COLUMN), (table.entry,), values) for table in tables
    ]
    answers = python_function((*_TILE, *shown), (logic.seen, logic.full), values)
    kv_len = values["kv_len"]

    def kind(tile: tuple[int, int, int, int], whole: bool) -> str:
        found: list[bool] = []
        for ends, entry in zip(touched, entries, strict=True):
            first_row, last_row, first_column, last_column = ends(*tile)
            cells = product(range(first_row, last_row + 1), range(first_column, last_column + 1))
            found += _some_and_every(bool(entry(*cell)[0]) for cell in cells)
        seen, full = answers(*tile, *found)
        return (UNMASKED if whole and full else MASKED) if seen else SKIPPED

    def row(q_first: int, q_last: int, block: int) -> str:
        firsts = range(0, kv_len, block)
        return "".join(
            kind((q_first, q_last, first, min(first + block, kv_len) - 1), first + block <= kv_len)
            for first in firsts
        )

    return row


def _by_data(predicate: Predicate, values: Values) -> Callable[[int, int, int], str]:
    """A row of tiles, as a kernel lists them from those that another one has decided."""
    decided = decided_tiles(predicate, values)
    kv_len = values["kv_len"]

    def kind(q_first: int, q_last: int, first: int, block: int) -> str:
        last = min(first + block, kv_len) - 1
        rows = range(q_first // TILE, q_last // TILE + 1)
        found = [decided(row, i) for row in rows for i in range(first // TILE, last // TILE + 1)]
        if not any(seen for seen, _ in found):
            return SKIPPED
        whole = first + block <= kv_len
        return UNMASKED if whole and all(full for _, full in found) else MASKED

    def row(q_first: int, q_last: int, block: int) -> str:
        return "".join(kind(q_first, q_last, first, block) for first in range(0, kv_len, block))

    return row


def _some_and_every(conditions: Iterable[bool]) -> tuple[bool, bool]:
    """Whether one condition holds, and whether all do; evaluates no more than it needs."""
    some, every = False, True
    for condition in conditions:
        some, every = some or condition, every and condition
        if some and not every:
            break
    return some, every
