"""A mask evaluated on whole tiles: whether a tile may have a visible element, and whether all are.

A predicate in negation normal form is evaluated in three values, hidden, visible and either:

- a comparison of integers, by its least and its greatest value in the tile. These are at the tile's
  corners if each term is monotonic in q_idx and in kv_idx; terms of q_idx alone need not be
  monotonic, because their extremes over the rows are computed;
- an element of a block table, by all the elements that the tile touches;
- a condition that depends on neither position has its value, and anything else is unknown.

For a mask that reads a block table, a kernel lists the tiles to visit by these answers. They are
conservative: a tile with a visible element is always seen, and a tile with a hidden element is
never full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational

from flashgen.symbolic.affine import summands
from flashgen.symbolic.blocks import BlockTable, block_table
from flashgen.symbolic.context import Context
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.logic import leaves, negation_normal_form
from flashgen.symbolic.tables import RowTable
from flashgen.symbolic.trace import KEYS_OF_ROWS, POSITIONS, Predicate
from flashgen.symbolic.varies_over import is_integral
from flashgen.symbols import (
    KV_FIRST,
    KV_IDX,
    KV_LAST,
    Q_FIRST,
    Q_IDX,
    Q_LAST,
    Load,
    RowMax,
    RowMin,
)


@dataclass(frozen=True)
class TileTable:
    """A block table, with symbols for its elements in a tile.

    Attributes:
        table: the block table.
        some: symbol: whether any element that the tile touches holds.
        every: symbol: whether all elements that the tile touches hold.
    """

    table: BlockTable
    some: Any
    every: Any


@dataclass(frozen=True)
class TileLogic:
    """The mask on the tile of rows q_first..q_last and keys kv_first..kv_last.

    Attributes:
        seen: sympy Boolean: some element may be visible. If false, no element is.
        full: sympy Boolean: every element is visible. If false, some may be hidden.
        tables: the block tables whose `some` and `every` the answers read.
        row_tables: the row tables that the answers read.
    """

    seen: Any
    full: Any
    tables: tuple[TileTable, ...]
    row_tables: tuple[RowTable, ...]

    @property
    def expressions(self) -> tuple[Any, ...]:
        """All expressions: the answers and the tables' indices."""
        tables = [(t.table.entry, *t.table.rows, *t.table.columns) for t in self.tables]
        return (self.seen, self.full, *(expr for exprs in tables for expr in exprs))


def tile_logic(predicate: Predicate) -> TileLogic | None:
    """A predicate that reads block tables, on whole tiles; None for any other predicate."""
    context = Context(with_row_tables(predicate), KEYS_OF_ROWS)
    expr = negation_normal_form(context.predicate.expr)
    found = {
        table: None for leaf in leaves(expr) if (table := block_table(leaf, context.declarations))
    }
    if not found:
        return None
    # sympy keeps the parts of a condition in its own order.
    named = {
        table.element: TileTable(table, *sympy.symbols(f"some_shown{s} all_shown{s}"))
        for i, table in enumerate(sorted(found, key=lambda table: str(table.element)))
        for s in [f"_{i}" if len(found) > 1 else ""]
    }
    seen, full = _answers(expr, named, context)
    # Nothing is known about unordered ids.
    unordered = context.predicate.unordered
    seen, full = sympy.Or(unordered, seen), sympy.And(sympy.Not(unordered), full)
    read = seen.free_symbols | full.free_symbols
    return TileLogic(
        seen=seen,
        full=full,
        tables=tuple(t for t in named.values() if {t.some, t.every} & read),
        row_tables=tuple(
            table
            for table in (*context.predicate.tables, *context.predicate.flags)
            if table.sym in read
        ),
    )


def _answers(expr: Any, tables: dict[Any, TileTable], context: Context) -> tuple[Any, Any]:
    """(seen, full) of a condition."""
    if isinstance(expr, sympy.And | sympy.Or):
        parts = [_answers(arg, tables, context) for arg in expr.args]
        seen, full = zip(*parts, strict=True)
        return expr.func(*seen), expr.func(*full)
    if not POSITIONS & expr.free_symbols:
        return expr, expr
    table = block_table(expr, context.declarations)
    if table is not None:
        some, every = tables[table.element].some, tables[table.element].every
        if isinstance(expr, sympy.Ne):
            return some, every
        return sympy.Not(every), sympy.Not(some)
    if isinstance(expr, Relational):
        ends = _extremes(expr.lhs - expr.rhs, context) if _is_whole(expr) else None
        if ends is not None:
            return compared(expr.func, *ends)
    return sympy.true, sympy.false


def _is_whole(comparison: Any) -> bool:
    return is_integral(comparison.lhs) and is_integral(comparison.rhs)


def compared(relation: Any, least: Any, most: Any) -> tuple[Any, Any]:
    """(seen, full) of ``x <relation> 0`` for an x in a tile from ``least`` to ``most``."""

    def holds(comparison: Any, x: Any) -> Any:
        """A comparison with subtracted terms on the other side, and a number alone on the right."""
        parts = sympy.Add.make_args(x)
        right = [-part for part in parts if part.as_coeff_Mul()[0] < 0]
        left = [part for part in parts if part.as_coeff_Mul()[0] >= 0]
        holding = comparison(sympy.Add(*left), sympy.Add(*right))
        is_turned = isinstance(holding, Relational) and holding.lhs.is_number
        return holding.reversed if is_turned else holding

    if relation in (sympy.Ge, sympy.Gt):
        return holds(relation, most), holds(relation, least)
    if relation in (sympy.Le, sympy.Lt):
        return holds(relation, least), holds(relation, most)
    within = sympy.And(holds(sympy.Le, least), holds(sympy.Ge, most))
    always = sympy.And(holds(sympy.Ge, least), holds(sympy.Le, most))
    if relation is sympy.Eq:
        return within, always
    return sympy.Not(always), sympy.Not(within)


def _extremes(expr: Any, context: Context) -> tuple[Any, Any] | None:
    """Bounds on an integer expression in a tile: as a rule its least and greatest value."""
    terms = sympy.Add.make_args(sympy.Add(*summands(expr)))
    of_keys = [term for term in terms if KV_IDX in term.free_symbols]
    of_rows = [term for term in terms if POSITIONS & term.free_symbols == {Q_IDX}]
    rest = [term for term in terms if not POSITIONS & term.free_symbols]
    least, most = _row_extremes(sympy.Add(*of_rows), context)
    low, high = [*rest, least], [*rest, most]
    for term in of_keys:
        q_way, kv_way = (
            context.declarations.direction(term, position) for position in (Q_IDX, KV_IDX)
        )
        if q_way is None or kv_way is None or term.has(Load):
            return None
        q_low, q_high = (Q_FIRST, Q_LAST) if q_way >= 0 else (Q_LAST, Q_FIRST)
        kv_low, kv_high = (KV_FIRST, KV_LAST) if kv_way >= 0 else (KV_LAST, KV_FIRST)
        low.append(term.xreplace({Q_IDX: q_low, KV_IDX: kv_low}))
        high.append(term.xreplace({Q_IDX: q_high, KV_IDX: kv_high}))
    return sympy.Add(*low), sympy.Add(*high)


def _row_extremes(expr: Any, context: Context) -> tuple[Any, Any]:
    """The least and the greatest value of an expression that depends on q_idx alone."""
    way = context.declarations.direction(expr, Q_IDX)
    # Outside of a tensor a kernel reads 0, which is not in its order.
    if way is None or not all(map(context.inside, expr.atoms(Load))):
        return RowMin(expr), RowMax(expr)
    ends = expr.xreplace({Q_IDX: Q_FIRST}), expr.xreplace({Q_IDX: Q_LAST})
    return ends if way >= 0 else (ends[1], ends[0])
