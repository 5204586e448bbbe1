"""trace: from a mask to the predicate that bounds are derived from and kernels print.

A predicate has two orientations: the keys of a tile of rows, and the rows of a tile of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational

from flashgen.declared import Param
from flashgen.masks import Mask
from flashgen.symbolic.affine import linearise
from flashgen.symbolic.equal_terms import simplified
from flashgen.symbolic.logic import negation_normal_form
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import KV_FIRST, KV_IDX, KV_LAST, KV_LEN, Q_FIRST, Q_IDX, Q_LAST, Q_LEN

POSITIONS = frozenset((Q_IDX, KV_IDX))


@dataclass(frozen=True, eq=False)
class Predicate:
    """A mask as data.

    Attributes:
        expr: sympy Boolean over b, h, q_idx, kv_idx, q_len, kv_len and the parameters: ``And`` and
            ``Or`` of comparisons, each with kv_idx alone on one side where it can be.
        params: the parameters and constants, in the order of first use.
        equal_lengths: defined for q_len == kv_len only.
        label: how the user wrote the mask.
        tables: the row tables that `expr` reads: see `flashgen.symbolic.gathers`.
        flags: the tables that say whether ids are out of order.
        unordered: sympy Boolean over elements of the flags: if true, `expr`, and bounds derived
            from it, must not be used.
    """

    expr: Any
    params: tuple[Param, ...] = ()
    equal_lengths: bool = False
    label: str = "mask"
    tables: tuple[RowTable, ...] = ()
    flags: tuple[RowTable, ...] = ()
    unordered: Any = sympy.false


def trace(mask: Mask) -> Predicate:
    """Call the mask's function with symbols.

    Raises:
        MaskError: the function fails on symbols or does not return a boolean.
    """
    expr = _arranged(simplified(negation_normal_form(mask.traced.sym)))
    return Predicate(expr, mask.params, mask.equal_lengths, mask.label)


def _arranged(expr: Any) -> Any:
    """Every comparison with kv_idx alone on one side: ``q_idx + ... >= kv_idx``, ``kv_idx < ...``.

    A kernel then adds to the rows' vector, once, and compares with the columns' vector: one
    operation an element. Strictness stays as the user wrote it.
    """
    if isinstance(expr, sympy.And):
        return sympy.And(*map(_arranged, expr.args))
    if isinstance(expr, sympy.Or):
        return sympy.Or(*map(_arranged, expr.args))
    if not isinstance(expr, Relational):
        return expr
    difference = linearise(expr.lhs - expr.rhs, POSITIONS)
    if difference is None:
        return expr
    for alone in (KV_IDX, Q_IDX):
        c, rest = difference.coefficient(alone), difference.without(alone)
        if abs(c) == 1:
            with_alone_left = expr if c == 1 else expr.reversed
            arranged = with_alone_left.func(alone, (rest * -c).to_sympy(), evaluate=False)
            upper_bound = not isinstance(arranged, sympy.Ge | sympy.Gt)
            return arranged.reversed if upper_bound and rest.coefficient(Q_IDX) else arranged
    return expr


@dataclass(frozen=True)
class Orientation:
    """Which position varies over a tile and which one is solved for.

    Attributes:
        tile: the position inside the tile, between `first` and `last`, below `tile_len`.
        solved: the position whose intervals are derived, below `solved_len`.
    """

    tile: Any
    first: Any
    last: Any
    tile_len: Any
    solved: Any
    solved_len: Any

    def holds_tile(self, expr: Any) -> bool:
        """Whether ``expr`` differs from row to row of the tile."""
        return self.tile in expr.free_symbols

    def holds_solved(self, expr: Any) -> bool:
        """Whether ``expr`` depends on the solved position."""
        return self.solved in expr.free_symbols


#: The keys that a tile of rows visits: what a forward kernel loops over.
KEYS_OF_ROWS = Orientation(Q_IDX, Q_FIRST, Q_LAST, Q_LEN, KV_IDX, KV_LEN)

#: The rows that visit a tile of keys: what a backward kernel loops over.
ROWS_OF_KEYS = Orientation(KV_IDX, KV_FIRST, KV_LAST, KV_LEN, Q_IDX, Q_LEN)


_OF_TILES = frozenset((Q_FIRST, Q_IDX, Q_LAST, KV_FIRST, KV_IDX, KV_LAST))


def is_of_tile(expr: Any) -> bool:
    """Whether ``expr`` depends on a position, not on batch entry, head and numbers alone."""
    return not _OF_TILES.isdisjoint(expr.free_symbols)
