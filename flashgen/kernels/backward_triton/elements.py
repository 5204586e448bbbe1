"""Shared memory of a block of a backward kernel for the tensors that its loop reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from flashgen.budget.matrix_units import KEPT_APART, Unit
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, NUM_WARPS
from flashgen.config import BackwardKernel
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.plan.code import codes_of
from flashgen.plan.promise import UNORDERED
from flashgen.plan.score_gradient import has_element_gradients, input_elements
from flashgen.plan.step_cost import shift_itemsizes, tile_loads, unordered_comparisons
from flashgen.symbolic.printer.code import Code
from flashgen.symbols import FloorDiv, Load

_SKIPPED = 1016
_PADDED = 8  # bytes of what is exchanged by one, to which at most one of padding is added
_GROUP = 4  # warps
_SCORE = 4  # bytes of a score; and what an asynchronous copy moves at least
_SCALAR = 8  # bytes of one that is copied, with what aligns the next


@dataclass(frozen=True)
class VisitedElements:
    """The shared memory for the loads of a kernel.

    Attributes:
        ahead: bytes that are copied ahead for each stage.
        exchanged: bytes that change from the layout of their load to the layout of the products.
        skipped: bytes that one stage of tcgen05 loses to alignment because of this exchange.
        summed: bytes that several stages of tcgen05 need for input gradients: two groups of warps
            that share the rows of a product exchange their sums.
        kept: bytes that change layout because weights may be dropped.
        unordered: bytes that change layout in the branch for ids out of order, before there are
            weights.
    """

    ahead: Any
    exchanged: Any
    skipped: Any
    summed: Any
    kept: Any
    unordered: Any


def visited_elements(
    plan: KernelPlan,
    kernel: BackwardKernel,
    unit: Unit,
    *,
    pipelined: bool,
    copied: bool,
    few_rows: bool,
    few_columns: bool,
) -> VisitedElements:
    """The shared memory for loads: exact for vectors of rows, an upper bound for all others.

    Args:
        plan: the forward plan.
        kernel: ``"keys"`` or ``"queries"``.
        unit: the matrix unit that multiplies the tiles.
        pipelined: the loop loads ahead.
        copied: the loop loads ahead by asynchronous copies, through shared memory.
        few_rows: a tile has fewer queries than there are threads.
        few_columns: a tile has fewer keys.
    """
    ahead = exchanged = skipped = sympy.Integer(0)
    visited = BLOCK_M if kernel == "keys" else BLOCK_N
    scores = BLOCK_M * BLOCK_N * _SCORE
    conditions = 0
    for load in tile_loads(plan):
        copies = copied and load.itemsize >= _SCORE
        if load.over == "scores":
            ahead += BLOCK_M * BLOCK_N * load.itemsize if copies else 0
        elif load.over == ("rows" if kernel == "keys" else "columns"):
            ahead += visited * load.itemsize if copies else 0
        if load.over != "rows":
            # Input gradients are exchanged as well, on their way to memory.
            exchanged += scores * (2 if kernel == "queries" else 1)
        elif kernel == "keys":
            exchanged += 0 if load.itemsize >= _SCORE else scores
            if not (few_rows or pipelined):
                skipped = sympy.Integer(_SKIPPED)
        elif load.masked and pipelined and not few_rows and unit in ("mma.sync", "wgmma"):
            # Elements of held queries that the mask reads change layout in its branch.
            conditions += 1
    if tile_loads(plan) and has_element_gradients(plan):
        number = _loads_of_derivative(plan)
        ahead += number * scores if copied else 0
        exchanged += number * scores
    if plan.code.tables and not pipelined:
        skipped = sympy.Integer(_SKIPPED)
    if kernel == "keys" and plan.code.tables:
        # The kernel reads block tables by elements: conditions are exchanged, with some padding.
        exchanged += BLOCK_M * BLOCK_N + FloorDiv(BLOCK_M * BLOCK_N, _PADDED)
        ahead += visited * _SCORE if copied else 0
    if kernel == "keys" and copied:
        ahead += sum(visited * size for size in shift_itemsizes(plan) if size >= _SCORE)
        # What is read once for a head of the group is copied as well.
        # Whether ids are in order is read for the bounds, where there are any.
        known = () if plan.listing else (UNORDERED,)
        scalars = [line.code for line in plan.code.scalars if line.name not in known]
        ahead += sum(map(_loads, scalars)) * (_SCORE if unit == "tcgen05" else _SCALAR)
    if conditions:  # of several vectors they are put together before that
        exchanged += BLOCK_M * _SCORE * (1 if conditions == 1 else _SCORE)
    kept = sympy.Integer(0)
    if plan.dropout and unit in KEPT_APART:  # words; where keys are rows, one for each of the two
        kept = BLOCK_M * BLOCK_N * (4 if kernel == "keys" else 2)
    asked = unordered_comparisons(plan)
    of_rows = 0 if few_rows else asked["rows"]
    of_columns = 0 if few_columns else asked["columns"]
    unordered = _unordered(kernel, unit, of_rows, of_columns, pipelined=pipelined)
    if kernel == "keys" and unit == "tcgen05" and plan.code.tables and plan.code.promise:
        unordered = scores  # beside elements of tables they take the layout of those loads
    if kernel == "queries" and of_columns > 1 and not (of_rows or pipelined):
        skipped = sympy.Integer(_SKIPPED)
    return VisitedElements(ahead, exchanged, skipped, _summed(plan, kernel), kept, unordered)


def _unordered(
    kernel: BackwardKernel, unit: Unit, of_rows: int, of_columns: int, *, pipelined: bool
) -> Any:
    """Bytes that the branch for ids out of order exchanges.

    If there are at least as many elements as threads, they are loaded in a layout that suits the
    load; otherwise each thread loads what it needs. The elements of one comparison are exchanged;
    several comparisons are combined first.

    Args:
        kernel: ``"keys"`` or ``"queries"``.
        unit: what multiplies the tiles.
        of_rows: how many comparisons ask for elements of queries, if those are no fewer.
        of_columns: the same of keys.
        pipelined: the loop loads ahead.
    """
    none, pairs = sympy.Integer(0), BLOCK_M * BLOCK_N  # a byte for each: whether it is seen
    if kernel == "keys":
        held, visited, row, column = of_columns, of_rows, BLOCK_N * _SCORE, BLOCK_M * _SCORE
    else:
        held, visited, row, column = of_rows, of_columns, BLOCK_M * _SCORE, BLOCK_N * _SCORE
    if unit == "tcgen05":  # a thread has a held row in any case
        if not visited:
            return none
        if kernel == "queries" and (held or visited == 1):
            return column
        return column if visited == 1 and pipelined else pairs * _SCORE  # scores, which stay so
    if not held:
        return none if not visited else column if visited == 1 else pairs
    if kernel == "queries":  # alone they take no more than what the mask reads of them anyway
        return row * _SCORE if visited else none
    if visited:
        return pairs
    return row if held == 1 else row * _SCORE


@lru_cache(maxsize=64)
def _loads_of_derivative(plan: KernelPlan) -> int:
    """Elements of the score's tensors that its derivative reads, choices taken apart."""
    text = backward_plan(plan).of_keys
    return sum(map(_loads, filter(None, (*codes_of(text.code.elements), text.score_gradient))))


def _loads(code: Code) -> int:
    return sum(isinstance(node, Load) for node in sympy.preorder_traversal(code.expr))


def _summed(plan: KernelPlan, kernel: BackwardKernel) -> Any:
    sums = any(
        item.kernel == kernel and item.over in ("heads", "rows", "columns")
        for item in input_elements(plan)
    )
    if not sums:
        return sympy.Integer(0)
    rows = BLOCK_N if kernel == "keys" else BLOCK_M
    return sympy.Piecewise((2 * rows * _SCORE, NUM_WARPS > _GROUP), (sympy.Integer(0), True))
