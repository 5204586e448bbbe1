"""What a kernel does with each tile of queries and keys, as derived from the mask: a picture.

A row of the picture is a tile of queries, with a character for each tile of keys: skipped, masked
or unmasked. The first head of the first sequence stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from flashgen.budget.traffic import Visit, Workload, tile_runs
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.symbolic import TileBounds
from flashgen.symbolic.tile_logic import TileLogic, tile_logic
from flashgen.symbols import evaluate

Values = Mapping[str, Any]

SKIPPED, MASKED, UNMASKED = ".", "x", "#"

#: Whoever has looked at the elements may say so of a masked tile that holds no visible one.
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
        q_len, kv_len: what it shows.
        block_m, block_n: queries and keys of a cell; the last ones may have fewer.
        rows: a string for each row, of a key of `KINDS` for each cell.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    rows: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many cells there are of each of `KINDS`, by name."""
        found = Counter("".join(self.rows))
        return Counter({name: found[kind] for kind, name in KINDS.items()})

    @property
    def visits(self) -> tuple[Visit, ...]:
        """For each row how many cells are visited without and with the mask."""
        return tuple(
            Visit(row.count(UNMASKED), row.count(MASKED) + row.count(FOR_NOTHING))
            for row in self.rows
        )

    def scaled(self, most_rows: int, most_columns: int) -> Picture:
        """The picture in cells of several tiles, so many at most.

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
    """The tiles of a kernel of this configuration, whose rows are of so many heads."""
    derived = tile_logic(plan.predicate) or plan.bounds  # the former of masks that read tables
    blocks = (config.BLOCK_M // heads_of_a_tile, config.BLOCK_N)
    return picture(derived, work.q_len, work.kv_len, *blocks, dict(work.params))


def picture(
    derived: TileBounds | TileLogic,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    values: Values,
) -> Picture:
    """The tiles of the first head of the first sequence.

    Args:
        derived: the bounds of a loop, or the logic by which a kernel lists tiles.
        q_len: queries.
        kv_len: keys.
        block_m: queries of a tile.
        block_n: keys of a tile.
        values: of parameters, row tables and constants; what a tensor's name stands for gives its
            elements for tuples of indices, 0 outside.
    """
    row = _by_bounds(derived) if isinstance(derived, TileBounds) else _by_list(derived)
    rows = []
    for q_first in range(0, q_len, block_m):
        at = {
            **values,
            "q_len": q_len,
            "kv_len": kv_len,
            "q_first": q_first,
            "q_last": min(q_first + block_m, q_len) - 1,
            "b": 0,
            "h": 0,
        }
        rows.append(row(at, block_n))
    return Picture(q_len, kv_len, block_m, block_n, tuple(rows))


def _by_bounds(bounds: TileBounds) -> Callable[[Values, int], str]:
    """A row of tiles of keys, as a loop over the derived runs visits them."""

    def row(at: Values, block: int) -> str:
        kinds = [SKIPPED] * -(-at["kv_len"] // block)
        for run in tile_runs(bounds, at, block):
            kinds[run.begin : run.end] = MASKED * (run.end - run.begin)
            kinds[run.full_begin : run.full_end] = UNMASKED * (run.full_end - run.full_begin)
        return "".join(kinds)

    return row


def _by_list(logic: TileLogic) -> Callable[[Values, int], str]:
    """What is done with a tile, where a kernel lists tiles by what block tables say."""

    def row(at: Values, block: int) -> str:
        return "".join(_listed(logic, at, first, block) for first in range(0, at["kv_len"], block))

    return row


def _listed(logic: TileLogic, at: Values, kv_first: int, block: int) -> str:
    kv_last = min(kv_first + block, at["kv_len"]) - 1
    known: dict[str, Any] = {**at, "kv_first": kv_first, "kv_last": kv_last}
    for named in logic.tables:
        shown = _entries(named.table, known)
        known |= {named.some.name: any(shown), named.every.name: all(shown)}
    if not evaluate(logic.seen, known):
        return SKIPPED
    whole = kv_first + block <= at["kv_len"]
    return UNMASKED if whole and evaluate(logic.full, known) else MASKED


def _entries(table: Any, known: Values) -> Sequence[bool]:
    """The elements of a block table that a tile touches, as conditions."""
    rows, columns = (
        range(evaluate(first, known), evaluate(last, known) + 1)
        for first, last in (table.rows, table.columns)
    )
    return [
        evaluate(table.entry, {**known, "block_row": i, "block_column": j}) != 0
        for i, j in product(rows, columns)
    ]
