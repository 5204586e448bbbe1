"""BlockLoads: a block table in the mask, read once a block.

A load for each element of a tile has a layout of its own, which Triton then gives the row sums and
maxima too: all scores move to it through shared memory, in tiles without a mask as well. Loads of
single blocks leave the scores where the matrix unit puts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.symbolic.affine import linearise, symbol
from flashgen.symbolic.blocks import BlockTable, block_table
from flashgen.symbolic.known import Known
from flashgen.symbolic.logic import leaves
from flashgen.symbolic.printer import triton_source
from flashgen.symbols import KV_FIRST, KV_IDX, Q_FIRST, Q_IDX

#: Of smaller blocks a tile holds too many to load one by one.
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class BlockLoads:
    """What the elements of a tile read of a block table, as source text.

    Attributes:
        suffix: what tells its variables apart: ``""`` where there is one table, else ``"_0"``...
            ``shown`` and this is the one that holds it, (BLOCK_M, BLOCK_N) conditions.
        row, column: the block of each query, and of each key.
        first_row, first_column: those of the tile's first.
        rows, columns: how many blocks it touches at most, compile-time constants.
        entry: the condition in row ``block_row`` and column ``block_column``.
    """

    suffix: str
    row: str
    column: str
    first_row: str
    first_column: str
    rows: str
    columns: str
    entry: str


def with_block_loads(
    conditions: tuple[Any, ...], params: Iterable[Param], nonnegative: Iterable[str]
) -> tuple[tuple[Any, ...], tuple[BlockLoads, ...]]:
    """The conditions with a symbol for what they read of block tables, and those reads.

    Tables whose blocks are small, or of a size that the call chooses, stay as they are.
    """
    nonnegative = tuple(nonnegative)
    found = [table for table in block_tables(conditions, params) if _is_countable(table)]

    def text(expr: Any) -> str:
        return triton_source(expr, {**KERNEL_NAMES, "kv_first": "start_n"}, nonnegative)

    loads = []
    for i, table in enumerate(found):
        suffix = f"_{i}" if len(found) > 1 else ""
        shown, element = sympy.Symbol(f"shown{suffix}"), table.element
        names = {sympy.Ne(element, 0, evaluate=False): shown, sympy.Eq(element, 0): ~shown}
        conditions = tuple(condition.xreplace(names) for condition in conditions)
        loads.append(
            BlockLoads(
                suffix=suffix,
                row=text(table.row),
                column=text(table.column),
                first_row=text(table.row.xreplace({Q_IDX: Q_FIRST})),
                first_column=text(table.column.xreplace({KV_IDX: KV_FIRST})),
                rows=most_blocks(table.row, Q_IDX, "BLOCK_M"),
                columns=most_blocks(table.column, KV_IDX, "BLOCK_N"),
                entry=text(sympy.Ne(table.entry, 0, evaluate=False)),
            )
        )
    return conditions, tuple(loads)


def block_tables(conditions: Iterable[Any], params: Iterable[Param]) -> list[BlockTable]:
    """The block tables that conditions read, by the text of their elements."""
    known = Known.of(params)
    found: dict[Any, BlockTable] = {}
    for leaf in (leaf for condition in conditions for leaf in leaves(condition)):
        table = block_table(leaf, known)
        if table:
            found[table.element] = table
    return sorted(found.values(), key=lambda table: str(table.element))


def _is_countable(table: BlockTable) -> bool:
    """Whether a tile touches few blocks, of which the number is known at compile time."""
    for index, position in ((table.row, Q_IDX), (table.column, KV_IDX)):
        numerator, size = linearise(index.args[0], frozenset((position,))), index.args[1]
        if numerator is None or not size.is_Integer:
            return False
        if size < SMALLEST_BLOCK * numerator.coefficient(position):
            return False
    return True


def most_blocks(index: Any, position: Any, side: str) -> str:
    """How many blocks a tile of a power of two of positions touches at most."""
    size, numerator = int(index.args[1]), linearise(index.args[0], frozenset((position,)))
    assert numerator is not None
    if numerator == symbol(position) and size & (size - 1) == 0:
        return f"({side} + {size - 1}) // {size}"  # it begins where a block does, or lies in one
    step = numerator.coefficient(position)
    return f"({f'{step} * ' if step > 1 else ''}{side} + {size - 1 - step}) // {size} + 1"
