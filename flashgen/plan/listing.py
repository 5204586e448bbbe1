"""TileListing: the kernel that lists the key tiles to visit, for a mask that reads block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.params import Int
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.plan.text import gathered_dimensions
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import triton_source
from flashgen.symbolic.tables import RowTable
from flashgen.symbolic.tile_logic import TileTable, tile_logic
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_FIRST, KV_LAST, Q_FIRST, Q_IDX, Q_LAST, B, H, RowMax, RowMin

#: What is a vector, with an element for each key tile.
_VECTORS = (KV_FIRST, KV_LAST)


@dataclass(frozen=True)
class PrintedTable:
    """A block table as source text.

    Attributes:
        entry: the element in row ``block_row`` and column ``block_column``, as a condition.
        first_row, last_row: those that the tile of queries touches.
        first_column, last_column: those that each tile of keys touches, vectors.
        some: the variable for whether any of these elements holds.
        every: the variable for whether all of them do.
        suffix: what tells its other variables apart: ``""`` where there is one table.
    """

    entry: str
    first_row: str
    last_row: str
    first_column: str
    last_column: str
    some: str
    every: str
    suffix: str


@dataclass(frozen=True)
class TileListing:
    """What is printed for the kernel that lists the tiles.

    Attributes:
        tables: the block tables that it reads.
        seen: conditions that all hold for a tile that may have a visible key.
        full: those that all hold where every query sees every key; None where that is never known.
        by_batch, by_head: whether the lists differ between batch entries, and heads.
        reduce_rows: whether a tile's answer depends on all its rows' positions, as ``q_rows``.
        names: the parameters and row tables that it reads.
        row_tables: the latter.
        gathers: the numbers of dimensions that tensors are indexed by.
    """

    tables: tuple[PrintedTable, ...]
    seen: tuple[str, ...]
    full: tuple[str, ...] | None
    by_batch: bool
    by_head: bool
    reduce_rows: bool
    names: frozenset[str]
    row_tables: tuple[RowTable, ...]
    gathers: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Whether a tile has more than one list."""
        return self.by_batch or self.by_head


def tile_listing(predicate: Predicate) -> TileListing | None:
    """The kernel that lists the tiles of a mask which reads block tables; None for any other."""
    logic = tile_logic(predicate)
    if logic is None:
        return None
    nonnegative = [p.name for p in predicate.params if isinstance(p, Int) and p.min >= 0]
    answers = [symbol for table in logic.tables for symbol in (table.some, table.every)]
    vectors = [symbol.name for symbol in (*_VECTORS, *answers)]

    def text(expr: Any) -> str:
        return triton_source(expr, KERNEL_NAMES, nonnegative, vectors)

    several = len(logic.tables) > 1
    tables = tuple(
        _printed(table, text, f"_{i}" if several else "") for i, table in enumerate(logic.tables)
    )
    seen, full = (tuple(map(text, conditions(expr))) for expr in (logic.seen, logic.full))
    texts = (*seen, *full, *(t for table in tables for t in vars(table).values()))
    symbols = {symbol for expr in logic.expressions for symbol in expr.free_symbols}
    return TileListing(
        tables=tables,
        seen=seen,
        full=None if logic.full is sympy.false else full,
        by_batch=B in symbols,
        by_head=H in symbols,
        reduce_rows=any(expr.has(RowMin, RowMax) for expr in logic.expressions),
        names=frozenset(s.name for s in symbols - {*answers, *_VECTORS, Q_FIRST, Q_LAST, Q_IDX}),
        row_tables=logic.row_tables,
        gathers=gathered_dimensions(texts),
    )


def _printed(table: TileTable, text: Any, suffix: str) -> PrintedTable:
    (first_row, last_row), (first_column, last_column) = table.table.rows, table.table.columns
    return PrintedTable(
        entry=text(sympy.Ne(table.table.entry, 0, evaluate=False)),
        first_row=text(first_row),
        last_row=text(last_row),
        first_column=text(first_column),
        last_column=text(last_column),
        some=table.some.name,
        every=table.every.name,
        suffix=suffix,
    )
