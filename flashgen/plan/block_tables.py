"""BlockLoads and BlockBits: a block table in the mask, read once a block.

A load for each element of a tile has a layout of its own, which Triton then gives the row sums and
maxima too: all scores move to it through shared memory, in tiles without a mask as well. Loads of
single blocks leave the scores where the matrix unit puts them.

Gluon kernels of the backward pass read whether a row sees a block of columns. Comparisons of
positions, as column bitmasks (`flashgen.symbolic.column_bitmask`), select the block's columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.block_lists import BlockLists
from flashgen.declared import Param
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.blocks import BLOCK_COLUMN, BLOCK_ROW, BlockTable, block_table
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.logic import leaves
from flashgen.symbolic.nodes import OtherBits
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import KV_FIRST, KV_IDX, Q_FIRST, Q_IDX, Load

#: Of smaller blocks a tile holds too many to load one by one.
SMALLEST_BLOCK = 16

_FIRST = {Q_IDX: Q_FIRST, KV_IDX: KV_FIRST}


@dataclass(frozen=True)
class BlockLoads:
    """The loads of a block table for the elements of a tile.

    Attributes:
        suffix: the suffix of its variables: ``""`` for a single table, else ``"_0"``... The
            variable ``shown`` with this suffix holds (BLOCK_M, BLOCK_N) conditions.
        row, column: the block of each query, and of each key.
        first_row, first_column: the blocks of the tile's first query and key.
        rows, columns: how many blocks it touches at most, compile-time constants; no rows where
            each query has a row of the table.
        entry: the condition in row ``block_row``, or of each query, and column ``block_column``.
    """

    suffix: str
    row: Code
    column: Code
    first_row: Code
    first_column: Code
    rows: str
    columns: str
    entry: Code

    @property
    def codes(self) -> tuple[Code, ...]:
        """What depends on the call."""
        return (self.entry, self.row, self.column, self.first_row, self.first_column)


@dataclass(frozen=True)
class BlockBits:
    """The loads of a block table for the rows of a tile.

    Attributes:
        name: the variable that holds the table's bits.
        block: the variable of a block of columns.
        first: the block of the tile's first column.
        count: how many blocks the tile touches at most, a compile-time constant of ``COLUMNS``.
        begin: the first column of a block.
        size: the number of columns of a block.
        entry: whether each row sees the block.
    """

    name: str
    block: str
    first: Code
    count: str
    begin: Code
    size: int
    entry: Code


@dataclass(frozen=True)
class _Side:
    """The blocks along the queries, or the keys, of a tile: few, as many as the compiler can know.

    Attributes:
        index: the block of a position.
        position: the position.
        numerator: what is divided for it.
        size: what that is divided by.
    """

    index: Any
    position: Any
    numerator: Affine
    size: int

    @property
    def first(self) -> Any:
        """The block of the tile's first position."""
        return self.index.xreplace(_FIRST)

    @property
    def step(self) -> int:
        """The growth of the numerator from one position to the next."""
        return self.numerator.coefficient(self.position)

    def most(self, length: str) -> str:
        """How many blocks a tile of a power of two of positions touches at most."""
        if self.numerator == symbol(self.position) and self.size & (self.size - 1) == 0:
            # It begins where a block does, or lies in one.
            return f"({length} + {self.size - 1}) // {self.size}"
        reach = f"{self.step} * {length}" if self.step > 1 else length
        return f"({reach} + {self.size - 1 - self.step}) // {self.size} + 1"


def with_block_loads(
    conditions: tuple[Any, ...], params: Iterable[Param], nonnegative: Collection[str]
) -> tuple[tuple[Any, ...], tuple[BlockLoads, ...]]:
    """The conditions with symbols in place of reads of block tables, and those reads.

    Tables whose blocks are small, or of a size that the call chooses, stay as they are.
    """
    found: list[tuple[BlockTable, _Side | None, _Side]] = []
    params = tuple(params)
    for table in _block_tables(conditions, params):
        rows, columns = _side(table.row, Q_IDX), _side(table.column, KV_IDX)
        if rows and columns:
            found.append((table, rows, columns))
    for table in _lists_of_queries(conditions, params):
        columns = _side(table.column, KV_IDX)
        if columns:
            found.append((table, None, columns))
    loads = []
    for i, (table, rows, columns) in enumerate(found):
        suffix = f"_{i}" if len(found) > 1 else ""
        shown = sympy.Symbol(f"shown{suffix}")
        names = dict(zip(_comparisons(table), (shown, ~shown), strict=True))
        conditions = tuple(condition.xreplace(names) for condition in conditions)
        loads.append(
            BlockLoads(
                suffix=suffix,
                row=_code(table.row, nonnegative),
                column=_code(table.column, nonnegative),
                first_row=_code(rows.first if rows else table.row, nonnegative),
                first_column=_code(columns.first, nonnegative),
                rows=rows.most("BLOCK_M") if rows else "",
                columns=columns.most("BLOCK_N"),
                entry=_code(sympy.Ne(_entry(table, rows), 0, evaluate=False), nonnegative),
            )
        )
    return conditions, tuple(loads)


def _entry(table: BlockTable, rows: _Side | None) -> Any:
    return table.entry if rows else table.element.xreplace({table.column: BLOCK_COLUMN})


def _lists_of_queries(conditions: Iterable[Any], params: Iterable[Param]) -> list[BlockTable]:
    """The tables of lists of blocks that conditions read and that have a row for each query."""
    lists = {p.sym for p in params if isinstance(p, BlockLists) and p.query_block == 1}
    loads = {load for condition in conditions for load in condition.atoms(Load)}
    found = [load for load in loads if load.args[0] in lists and load.args[-2] == Q_IDX]
    return [BlockTable(x, x.args[-2], x.args[-1]) for x in sorted(found, key=str)]


def block_bits(
    conditions: Iterable[Any], params: Iterable[Param], nonnegative: Collection[str], along: Axes
) -> tuple[tuple[BlockBits, ...], dict[Any, Any]]:
    """The tables that conditions read and that have bits, and those of each comparison of one.

    Tables whose blocks are small along the columns, or of a size that the call chooses, have none,
    nor those of which blocks and positions do not go at one pace.

    Args:
        conditions: of the mask.
        params: what is known of tensors.
        nonnegative: parameters known to be >= 0.
        along: what the columns of a tile are of.
    """
    of_queries = along == Axes.ROW
    position, block = (Q_IDX, BLOCK_ROW) if of_queries else (KV_IDX, BLOCK_COLUMN)
    found: list[BlockBits] = []
    comparisons: dict[Any, Any] = {}
    tables = _block_tables(conditions, params)
    for i, table in enumerate(tables):
        side = _side(table.row if of_queries else table.column, position)
        if side is None or side.step != 1:
            continue
        entry = table.element.xreplace({side.index: block})
        bits = BlockBits(
            name=f"shown_{i}" if len(tables) > 1 else "shown",
            block=block.name,
            first=_code(side.first, nonnegative),
            count=side.most("COLUMNS"),
            begin=_code(
                side.size * block - side.numerator.without(position).to_sympy(), nonnegative
            ),
            size=side.size,
            entry=_code(sympy.Ne(entry, 0, evaluate=False), nonnegative),
        )
        found.append(bits)
        shown = sympy.Symbol(bits.name)
        comparisons |= zip(_comparisons(table), (shown, OtherBits(shown)), strict=True)
    return tuple(found), comparisons


def _block_tables(conditions: Iterable[Any], params: Iterable[Param]) -> list[BlockTable]:
    """The block tables that conditions read, by the text of their elements."""
    declarations = Declarations.of(params)
    found: dict[Any, BlockTable] = {}
    for leaf in (leaf for condition in conditions for leaf in leaves(condition)):
        table = block_table(leaf, declarations)
        if table:
            found[table.element] = table
    return sorted(found.values(), key=lambda table: str(table.element))


def _comparisons(table: BlockTable) -> tuple[Any, Any]:
    """How a mask asks whether an element of the table is set, and whether it is not."""
    return tuple(relation(table.element, 0, evaluate=False) for relation in (sympy.Ne, sympy.Eq))


def _side(index: Any, position: Any) -> _Side | None:
    """The blocks of one side; None where a tile may touch many, or a number that calls choose."""
    numerator, size = linearise(index.args[0], frozenset((position,))), index.args[1]
    if numerator is None or not size.is_Integer:
        return None
    side = _Side(index, position, numerator, int(size))
    return side if side.size >= SMALLEST_BLOCK * side.step else None


def _code(expr: Any, nonnegative: Collection[str]) -> Code:
    return triton_code(expr, {**KERNEL_NAMES, "kv_first": "start_n"}, nonnegative)
