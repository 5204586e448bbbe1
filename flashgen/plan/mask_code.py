"""MaskCode: the conditions of a mask, as the Gluon kernels compute them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy

from flashgen.plan.block_tables import BlockBits
from flashgen.plan.promise import KeptPromise
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.nodes import AsBits, AtLeast, Below
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN

#: Columns of a tile that LLVM compares one by one: the outcomes of more it packs into bits.
FEW_COLUMNS = 64

#: A condition, and its bits, or None where it has none.
Condition = tuple[Code, Code | None]

_ENDS = {"q": sympy.Lt(Q_IDX, Q_LEN), "kv": sympy.Lt(KV_IDX, KV_LEN)}


@dataclass(frozen=True)
class MaskCode:
    """Conditions that all have to hold, in one of two ways.

    Attributes:
        pairs: each, computed for every pair.
        bitmasks: their column bitmasks.
        rows: vectors of rows that bits are made of.
        tables: what they read of block tables.
        own: conditions of each column alone, whose bits these bitmasks read.
        own_lines: what the columns' values are that these conditions read.
        gathered: whether these bitmasks are the conditions, computed bit by bit.
    """

    pairs: tuple[Code, ...]
    bitmasks: tuple[Code, ...] = ()
    rows: tuple[str, ...] = ()
    tables: tuple[BlockBits, ...] = ()
    own: tuple[Assignment, ...] = ()
    own_lines: tuple[Assignment, ...] = ()
    gathered: bool = False

    @property
    def asks_below(self) -> bool:
        """Whether some bits say which positions are below something."""
        return any(bits.expr.has(Below) for bits in self.bitmasks)


def mask_code(
    conditions: Iterable[Condition],
    position: str,
    rows: Iterable[str],
    *,
    least: int,
    tables: Iterable[BlockBits] = (),
    own: tuple[Assignment, ...] = (),
    own_lines: tuple[Assignment, ...] = (),
) -> MaskCode:
    """Conditions by how they are computed.

    Bits cost the same however many columns there are, and take less registers than comparisons that
    LLVM packs. They do not pay where rows alone are told apart, where a condition has none, nor
    where they save few comparisons.

    Args:
        conditions: each with its bits.
        position: what the columns of a tile are told apart by.
        rows: the names of vectors of rows.
        least: comparisons from which on bits pay.
        tables: what bits read of block tables: pairs would load an element each.
        own: conditions of each column alone, whose bits bits read: a warp computes each once.
        own_lines: what the columns' values are that these read.
    """
    conditions = tuple(conditions)
    pairs = tuple(condition for condition, _ in conditions)
    bitmasks = tuple(bits for _, bits in conditions if bits is not None)
    tables = tuple(tables)
    if len(bitmasks) < len(pairs) or not (tables or own or position in read_by(bitmasks)):
        return MaskCode(pairs)
    if sum(map(_comparisons, bitmasks)) < least and not (tables or own):
        return MaskCode(pairs)
    read = read_by((*bitmasks, *(table.entry for table in tables)))
    of_rows = tuple(name for name in rows if name in read)
    return MaskCode((), bitmasks, of_rows, tables, own, own_lines)


def _comparisons(bits: Code) -> int:
    nodes = sympy.preorder_traversal(bits.expr)
    return sum(isinstance(node, AtLeast | Below) for node in nodes)


def with_promise(mask_code: MaskCode, row: str, promise: KeptPromise | None) -> MaskCode:
    """`mask_code`, and for ids out of order the mask as written: what a kernel has bitmasks for.

    Args:
        mask_code: what a masked tile asks.
        row: the position of a row.
        promise: what that trusts.
    """
    if promise is None:
        return mask_code
    return replace(
        mask_code,
        bitmasks=(*mask_code.bitmasks, *promise.conditions),
        rows=mask_code.rows or (row,),
    )


def least_comparisons(columns: int, *, scored: bool) -> int:
    """From how many on bits pay in a backward kernel, whose tiles have this many columns.

    One comparison of few columns is cheaper where a score function has all registers taken.
    """
    return 2 if scored and columns <= FEW_COLUMNS else 1


def rows_end(of: str) -> Condition:
    """That a row of the scores is one, of q or kv."""
    return triton_code(_ENDS[of]), triton_code(AsBits(_ENDS[of]))


def columns_end(of: str) -> Condition:
    """That a column of the scores is one, of q or kv."""
    return triton_code(_ENDS[of]), triton_code(Below(*_ENDS[of].args))
