"""Block tables: masks that read ``layout[h, q_idx // 64, kv_idx // 64]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.declarations import Declarations
from flashgen.symbols import KV_FIRST, KV_IDX, KV_LAST, Q_FIRST, Q_IDX, Q_LAST, FloorDiv, Load

#: A row and a column of a block table.
BLOCK_ROW, BLOCK_COLUMN = sympy.symbols("block_row block_column", integer=True)


@dataclass(frozen=True)
class BlockTable:
    """A tensor of conditions, one for each block of queries and block of keys.

    Attributes:
        element: the `Load` of the condition for a query and a key.
        row: the block of queries, in terms of q_idx; it never falls.
        column: the block of keys, in terms of kv_idx; it never falls.
    """

    element: Load
    row: Any
    column: Any

    @property
    def entry(self) -> Any:
        """The element in row `BLOCK_ROW` and column `BLOCK_COLUMN`."""
        return self.element.xreplace({self.row: BLOCK_ROW, self.column: BLOCK_COLUMN})

    @property
    def rows(self) -> tuple[Any, Any]:
        """The first and the last row that a tile touches."""
        return self.row.xreplace({Q_IDX: Q_FIRST}), self.row.xreplace({Q_IDX: Q_LAST})

    @property
    def columns(self) -> tuple[Any, Any]:
        """The first and the last column that a tile touches."""
        return self.column.xreplace({KV_IDX: KV_FIRST}), self.column.xreplace({KV_IDX: KV_LAST})


def block_table(condition: Any, declarations: Declarations) -> BlockTable | None:
    """The block table that a comparison with 0 reads; None for any other condition.

    One index is a quotient of q_idx, or of an expression that grows with q_idx, and one is a
    quotient of kv_idx; the others are the same for every query and key.
    """
    if not isinstance(condition, sympy.Ne | sympy.Eq):
        return None
    element, zero = condition.args
    if not (zero == 0 and isinstance(element, Load) and declarations.is_condition(element.args[0])):
        return None
    rows = [index for index in element.args[1:] if Q_IDX in index.free_symbols]
    columns = [index for index in element.args[1:] if KV_IDX in index.free_symbols]
    if len(rows) != 1 or len(columns) != 1 or rows == columns:
        return None
    (row,), (column,) = rows, columns
    if not (
        _counts_blocks(row, Q_IDX, declarations) and _counts_blocks(column, KV_IDX, declarations)
    ):
        return None
    return BlockTable(element, row, column)


def _counts_blocks(index: Any, position: Any, declarations: Declarations) -> bool:
    return (
        isinstance(index, FloorDiv)
        and not index.has(Load)
        and declarations.direction(index, position) == 1
    )
