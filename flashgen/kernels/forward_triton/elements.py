"""The shared memory of a block for elements of tensors that the loop over the keys reads.

Triton reads elements in the layout that suits the load, neighbouring threads at neighbouring
addresses, and needs them in the layout of the products. Elements of 4 bytes are copied ahead, as
tiles of keys are, and change layout on the way through shared memory. The others are exchanged
between threads once they are there:

- Where elements are added to the raw products, and that first of all, a product starts from them:
  they are exchanged before it, and Triton copies no such operand ahead.
- What the mask reads is loaded in its branch, from which nothing is copied ahead: the conditions
  are exchanged, a byte each, or in a loop without copies the scores.
- Words of dropout are made for eight scores at once, which are in one thread where a unit leaves
  rows and columns by eights. Elsewhere they are exchanged before their halves are told apart.
- Columns fewer than the threads are not worth an exchange: each thread loads those that it needs.
  More of them decide on the layout of the branch, and it is the scores that are exchanged.
- What the mask reads where ids are out of order decides likewise, rows as well as columns, and
  rows before columns. The softmax is then computed in both layouts: all scores cross over, masked
  or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.budget.matrix_units import KEPT_APART, Unit
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, NUM_STAGES, NUM_WARPS, widths
from flashgen.plan.step_cost import Axis, TileLoad
from flashgen.symbols import FloorDiv

_SCORE = 4  # bytes of a score; and what an asynchronous copy moves at least
_CONDITION = 1
_HALF_WORD = 2
_LONGEST_STORE = 16  # bytes that a thread stores at once
_MMA_ROWS = 16  # of a matrix product of one warp
_MFMA_ROWS = 32
_UNORDERED_ROW = {"wgmma": 16, "mfma": 32}  # bytes for each row of scores; 64 of other units
_CROSSING = 4096  # bytes in which one warp group hands scores to the other


@dataclass(frozen=True)
class Exchange:
    """Elements that change from the layout of their loads to that of the products.

    Attributes:
        over: what has an element each, as of a `TileLoad`.
        itemsize: bytes that are exchanged for an element.
        before: before the first product, else after it.
        beside: whose elements lie side by side, as of a `TileLoad`.
    """

    over: str
    itemsize: int
    before: bool
    beside: str


@dataclass(frozen=True)
class Elements:
    """The shared memory for the loads of a kernel.

    Attributes:
        some: whether there are any.
        ahead: bytes for each score of the tiles that are copied ahead.
        columns_ahead: the same for each key, of vectors.
        rows: how many vectors of rows' elements the branch for masked tiles exchanges, and the
            loop, of several that the score reads.
        exchanges: what else is exchanged, without repetition.
        in_branch: whether the branch for masked tiles loads.
        rows_unordered: whether scores cross over to the layout of rows that a branch loads: that
            for ids out of order, or where queries have their own rows of a block table.
    """

    some: bool = False
    ahead: int = 0
    columns_ahead: int = 0
    rows: int = 0
    exchanges: tuple[Exchange, ...] = ()
    in_branch: bool = False
    rows_unordered: bool = False

    def copies(self) -> Any:
        """Bytes of elements that are copied ahead."""
        return (NUM_STAGES - 1) * BLOCK_N * (BLOCK_M * self.ahead + self.columns_ahead)


def elements_of(
    loads: tuple[TileLoad, ...],
    unordered: Mapping[Axis, int],
    unit: Unit,
    *,
    copied: bool,
    one_product: bool,
    few_rows: bool,
    few_columns: bool,
    table_rows: bool,
    dropout: bool,
) -> Elements:
    """The shared memory for loads.

    Args:
        loads: the loads of a step.
        unordered: how many comparisons read elements in the branch for ids out of order.
        unit: the matrix unit that multiplies the tiles.
        copied: the pipeline copies loads ahead, through shared memory.
        one_product: scores are one product, not a sum of several.
        few_rows: there are fewer rows than threads.
        few_columns: there are fewer columns than threads.
        table_rows: each query has its own row of a block table, which masked tiles read.
        dropout: weights may be dropped.
    """
    ahead = columns_ahead = rows = 0
    exchanges: dict[Exchange, None] = {}
    in_branch = False
    of_score = sum(load.over == "rows" and not load.masked for load in loads)
    for load in loads:
        added = load.added and one_product
        columns = load.over == "columns"
        if load.over == "rows":  # one of the score changes layout before the loop, several within
            rows += (load.masked or of_score > 1) and not few_rows
            continue
        in_branch |= load.masked
        starts = added and unit != "tcgen05"  # whose sums are not in registers
        if copied and load.itemsize >= _SCORE and not (load.masked or starts):
            ahead += 0 if columns else load.itemsize
            columns_ahead += load.itemsize if columns else 0
            if not load.as_index:
                continue
        if columns and few_columns:
            continue
        if columns and not added:
            exchange = Exchange("scores", _SCORE, False, "both")
        elif load.masked:
            size = _CONDITION if copied else _SCORE
            exchange = Exchange(load.over, size, False, load.beside)
        elif added:
            size = _SCORE if columns else load.itemsize
            exchange = Exchange(load.over, size, True, load.beside)
        else:
            exchange = Exchange(load.over, _SCORE, False, load.beside)
        exchanges[exchange] = None
    if dropout and unit in KEPT_APART:
        exchanges[Exchange("scores", _HALF_WORD, False, "both")] = None
    rows_unordered = (table_rows or unordered["rows"] > 0) and not few_rows
    if unordered["columns"] and not few_columns:
        over: Axis = "columns" if rows_unordered else "scores"
        exchanges[Exchange(over, _SCORE, False, "both")] = None
    return Elements(
        bool(loads), ahead, columns_ahead, rows, tuple(exchanges), in_branch, rows_unordered
    )


def exchanged(elements: Elements, unit: Unit, *, before: bool, as_output: bool) -> Any:
    """Bytes of shared memory through which elements change layout, one load after the other.

    Args:
        elements: what the loads come to.
        unit: what multiplies the tiles.
        before: before the first product, else after it.
        as_output: a tile of scores has the shape of an output tile.
    """
    sizes = [_bytes(x, unit, as_output) for x in elements.exchanges if x.before == before]
    if not before:
        sizes.append(BLOCK_M * _row_bytes(elements, unit))
        if unit == "tcgen05" and elements.in_branch:
            # With two warp groups, scores cross over where the branch ends.
            sizes.append(sympy.Piecewise((_CROSSING, NUM_WARPS > 4), (sympy.Integer(0), True)))
    return sympy.Max(0, *sizes)


def _bytes(exchange: Exchange, unit: Unit, as_output: bool) -> Any:
    if exchange.over == "columns":
        return BLOCK_N * exchange.itemsize
    tile = BLOCK_M * BLOCK_N * exchange.itemsize
    if exchange.beside == "rows":
        pieces = BLOCK_M * _by_rows(exchange, unit)
    elif exchange.beside == "columns" and as_output:
        pieces = _in_runs(unit)
    else:
        return tile
    # Warps without rows of their own share out columns; nor has a product of fewer rows pieces.
    least = _MFMA_ROWS if unit == "mfma" else _MMA_ROWS * NUM_WARPS
    return sympy.Piecewise((tile, least > BLOCK_M), (sympy.Min(tile, pieces), True))


def _in_runs(unit: Unit) -> Any:
    """Bytes for a tile of an output tile's shape.

    It is loaded as that is stored, in runs as long as a thread can store. Some of them are what the
    thread needs, so the tile changes in pieces.
    """
    scores = BLOCK_M * BLOCK_N * _SCORE
    run = FloorDiv(_LONGEST_STORE, ITEMSIZE)
    if unit == "tcgen05":  # a thread has a row of the scores, and so all of a run
        return FloorDiv(scores, run)
    if unit not in ("mma.sync", "wgmma"):
        return scores
    # It has two columns of a run, and of the rows every eighth and those of its warp's next tiles.
    rows = FloorDiv(32 * NUM_WARPS * run, BLOCK_N)
    eighth = sympy.Piecewise((2, rows <= 8), (1, True))
    next_tiles = sympy.Max(1, FloorDiv(BLOCK_M, _MMA_ROWS * NUM_WARPS))
    return FloorDiv(scores, 2 * eighth * next_tiles)


def _by_rows(exchange: Exchange, unit: Unit) -> Any:
    """Bytes for each row, where a warp loads a column of elements.

    Its rows are those of the product's layout, or nearly: what changes threads are a few columns.
    """
    if unit == "tcgen05":  # a thread has a row in both, unless 64 rows are half a unit
        groups = sympy.Piecewise((64, NUM_WARPS > 4), (0, True)) if not exchange.before else 0
        return sympy.Piecewise((64, BLOCK_M < 128), (groups, True))
    if unit == "mfma":
        return 64 * sympy.Max(1, FloorDiv(32 * NUM_WARPS, BLOCK_M))
    columns = sympy.Piecewise((4, 32 * NUM_WARPS <= BLOCK_M), (8, True))
    if unit != "mma.sync":
        return columns * _SCORE
    # Warps that share out columns, as they do for output tiles of few rows, exchange everything.
    apart = _SCORE * (1 if exchange.before else exchange.itemsize)
    by_columns = widths("v", 1)[0] > BLOCK_M
    return sympy.Piecewise((BLOCK_N * exchange.itemsize, by_columns), (columns * apart, True))


def _row_bytes(elements: Elements, unit: Unit) -> int:
    """Bytes for each row: conditions of several vectors are put together before an exchange."""
    if unit == "tcgen05":  # there a thread has a row in any case
        return 0
    if elements.rows_unordered:  # scores, in pieces
        return _UNORDERED_ROW.get(unit, 64)
    if elements.rows < 2:
        return _SCORE * elements.rows
    return 32 if unit == "mfma" else 16
