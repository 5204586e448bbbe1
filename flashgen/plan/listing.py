"""TileListing: the kernel that lists the key tiles to visit, for a mask that reads block tables."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from flashgen.params import Int
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.symbolic.logic import conditions, leaves
from flashgen.symbolic.printer import plain_source, triton_code
from flashgen.symbolic.printer.code import Code, gathered_by
from flashgen.symbolic.tables import RowTable
from flashgen.symbolic.tile_logic import TileTable, tile_logic
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_FIRST, KV_LAST, Q_FIRST, Q_IDX, Q_LAST, B, H, RowMax, RowMin

#: What is a vector, with an element for each key tile.
_VECTORS = (KV_FIRST, KV_LAST)


@dataclass(frozen=True)
class ListedTable:
    """A block table as the kernel reads it.

    Attributes:
        entry: the element in row ``block_row`` and column ``block_column``, as a condition.
        first_row, last_row: those that the tile of queries touches.
        first_column, last_column: those that each tile of keys touches, vectors.
        some: the variable for whether any of these elements holds.
        every: the variable for whether all of them do.
        suffix: what tells its other variables apart: ``""`` where there is one table.
    """

    entry: Code
    first_row: Code
    last_row: Code
    first_column: Code
    last_column: Code
    some: str
    every: str
    suffix: str

    @property
    def codes(self) -> tuple[Code, ...]:
        """What is computed of it."""
        return (self.entry, self.first_row, self.last_row, self.first_column, self.last_column)


@dataclass(frozen=True)
class TileListing:
    """What the kernel does that lists the tiles.

    Attributes:
        said: the conditions of block tables, and those that algebra solves, in words.
        tables: the block tables that it reads.
        seen: conditions that all hold for a tile that may have a visible key.
        full: those that all hold where every query sees every key; None where that is never known.
        by_batch, by_head: whether the lists differ between batch entries, and heads.
        reduce_rows: whether a tile's answer depends on all its rows' positions, as ``q_rows``.
        names: the parameters and row tables that it reads.
        row_tables: the latter.
        gathers: the numbers of dimensions that tensors are indexed by.
    """

    said: tuple[str, str]
    tables: tuple[ListedTable, ...]
    seen: tuple[Code, ...]
    full: tuple[Code, ...] | None
    by_batch: bool
    by_head: bool
    reduce_rows: bool
    names: frozenset[str]
    row_tables: tuple[RowTable, ...]
    gathers: tuple[int, ...]

    #: Whether there is a list for each head of keys.
    by_group = False
    #: No kernel decides tiles before they are listed: see `flashgen.plan.classified`.
    classified = False

    @property
    def note(self) -> str:
        """Which part of the mask is solved how, for a build and for explain."""
        by_table, by_algebra = self.said
        solved = f"; algebra solves {by_algebra}" if by_algebra else ""
        return f"tiles are listed once a call, by the table of blocks in {by_table}{solved}"

    @property
    def several(self) -> bool:
        """Whether a tile has more than one list."""
        return self.by_batch or self.by_head


@lru_cache(maxsize=1024)  # a build asks for the same ones at several steps, of every spec
def tile_listing(predicate: Predicate) -> TileListing | None:
    """The kernel that lists the tiles of a mask which reads block tables; None for any other."""
    logic = tile_logic(predicate)
    if logic is None:
        return None
    nonnegative = [p.name for p in predicate.params if isinstance(p, Int) and p.min >= 0]
    answers = [symbol for table in logic.tables for symbol in (table.some, table.every)]
    vectors = [symbol.name for symbol in (*_VECTORS, *answers)]

    def code(expr: Any) -> Code:
        return triton_code(expr, KERNEL_NAMES, nonnegative, vectors)

    several = len(logic.tables) > 1
    tables = tuple(
        _listed(table, code, f"_{i}" if several else "") for i, table in enumerate(logic.tables)
    )
    seen, full = (tuple(map(code, conditions(expr))) for expr in (logic.seen, logic.full))
    symbols = {symbol for expr in logic.expressions for symbol in expr.free_symbols}
    return TileListing(
        said=said_apart(predicate, _by_table(predicate, logic.tables)),
        tables=tables,
        seen=seen,
        full=None if logic.full is sympy.false else full,
        by_batch=B in symbols,
        by_head=H in symbols,
        reduce_rows=any(expr.has(RowMin, RowMax) for expr in logic.expressions),
        names=frozenset(s.name for s in symbols - {*answers, *_VECTORS, Q_FIRST, Q_LAST, Q_IDX}),
        row_tables=logic.row_tables,
        gathers=gathered_by((*seen, *full, *(code for table in tables for code in table.codes))),
    )


def _by_table(predicate: Predicate, tables: tuple[TileTable, ...]) -> list[Any]:
    """The conditions of a predicate that read block tables."""
    elements = [named.table.element for named in tables]
    return [part for part in leaves(predicate.expr) if part.has(*elements)]


def said_apart(predicate: Predicate, listed: Collection[Any]) -> tuple[str, str]:
    """In words the conditions of a predicate that lists solve, and its others."""
    others = [part for part in leaves(predicate.expr) if part not in listed]
    by_lists, by_algebra = (", ".join(map(plain_source, parts)) for parts in (listed, others))
    return by_lists, by_algebra


def _listed(table: TileTable, code: Callable[[Any], Code], suffix: str) -> ListedTable:
    (first_row, last_row), (first_column, last_column) = table.table.rows, table.table.columns
    return ListedTable(
        entry=code(sympy.Ne(table.table.entry, 0, evaluate=False)),
        first_row=code(first_row),
        last_row=code(last_row),
        first_column=code(first_column),
        last_column=code(last_column),
        some=table.some.name,
        every=table.every.name,
        suffix=suffix,
    )
