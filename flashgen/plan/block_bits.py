"""BlockBits: a block table in the mask, as bits of octets of columns.

What a row sees of a block of columns is one element, loaded once for both; which columns the block
has, a comparison of positions says for eight of them at once (`flashgen.symbolic.octets`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.plan.block_loads import SMALLEST_BLOCK, block_tables, most_blocks
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.symbolic.affine import linearise
from flashgen.symbolic.blocks import BLOCK_COLUMN, BLOCK_ROW, BlockTable
from flashgen.symbolic.places import Place
from flashgen.symbolic.printer import triton_source
from flashgen.symbols import KV_FIRST, KV_IDX, Q_FIRST, Q_IDX


@dataclass(frozen=True)
class BlockBits:
    """What a tile reads of a block table, as source text.

    Attributes:
        name: the variable that holds its bits.
        block: that of a block of columns.
        first: the block of the tile's first column.
        count: how many the tile touches at most, a compile-time constant of ``COLUMNS``.
        begin: the first column of a block.
        size: how many it has.
        entry: whether each row sees it.
    """

    name: str
    block: str
    first: str
    count: str
    begin: str
    size: int
    entry: str


def block_bits(
    conditions: Iterable[Any], params: Iterable[Param], nonnegative: Iterable[str], along: Place
) -> tuple[tuple[BlockBits, ...], dict[Any, str]]:
    """The tables that conditions read and that have bits, and the text of each comparison of one.

    Tables whose blocks are small along the columns, or of a size that the call chooses, have none,
    nor those of which blocks and positions do not go at one pace.

    Args:
        conditions: of the mask.
        params: what is known of tensors.
        nonnegative: parameters known to be >= 0.
        along: what the columns of a tile are of.
    """
    of_queries, nonnegative = along == Place.ROW, tuple(nonnegative)
    position, block = (Q_IDX, BLOCK_ROW) if of_queries else (KV_IDX, BLOCK_COLUMN)

    def text(expr: Any) -> str:
        return triton_source(expr, {**KERNEL_NAMES, "kv_first": "start_n"}, nonnegative)

    def printed(table: BlockTable, name: str) -> BlockBits | None:
        index = table.row if of_queries else table.column
        numerator, size = linearise(index.args[0], frozenset((position,))), index.args[1]
        if numerator is None or numerator.coefficient(position) != 1:
            return None
        if not size.is_Integer or size < SMALLEST_BLOCK:
            return None
        entry = table.element.xreplace({index: block})
        return BlockBits(
            name=name,
            block=block.name,
            first=text(index.xreplace({Q_IDX: Q_FIRST, KV_IDX: KV_FIRST})),
            count=most_blocks(index, position, "COLUMNS"),
            begin=text(size * block - numerator.without(position).to_sympy()),
            size=int(size),
            entry=text(sympy.Ne(entry, 0, evaluate=False)),
        )

    found, texts = [], {}
    tables = block_tables(conditions, params)
    for i, table in enumerate(tables):
        bits = printed(table, f"shown_{i}" if len(tables) > 1 else "shown")
        if bits is not None:
            found.append(bits)
            texts[sympy.Ne(table.element, 0, evaluate=False)] = bits.name
            texts[sympy.Eq(table.element, 0, evaluate=False)] = f"~{bits.name}"
    return tuple(found), texts
