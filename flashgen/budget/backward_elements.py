"""What a block of a backward kernel holds in shared memory because its loop reads tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.budget.elements import KEPT_APART
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, Unit
from flashgen.config import BackwardKernel
from flashgen.plan import KernelPlan
from flashgen.plan.inner import tile_loads

_SKIPPED = 1016
_SCORE = 4  # bytes of a score; and what an asynchronous copy moves at least


@dataclass(frozen=True)
class VisitedElements:
    """What the loads of a kernel come to.

    Attributes:
        ahead: bytes that are copied ahead for each stage.
        exchanged: bytes that change from the layout of their load to that of the products.
        skipped: bytes that one stage of tcgen05 loses by that, to alignment.
        kept: bytes that change layout because weights may be dropped.
    """

    ahead: Any
    exchanged: Any
    skipped: Any
    kept: Any


def visited_elements(
    plan: KernelPlan,
    kernel: BackwardKernel,
    unit: Unit,
    *,
    pipelined: bool,
    copied: bool,
    few_rows: bool,
) -> VisitedElements:
    """What loads come to: exact for vectors of rows, an upper bound for all others.

    Args:
        plan: the forward's.
        kernel: ``"keys"`` or ``"queries"``.
        unit: what multiplies the tiles.
        pipelined: the loop loads ahead.
        copied: it does so by asynchronous copies, through shared memory.
        few_rows: a tile has fewer queries than there are threads.
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
            # What they learn is exchanged as well, on its way to memory.
            exchanged += scores * (2 if kernel == "queries" else 1)
        elif kernel == "keys":
            exchanged += 0 if load.itemsize >= _SCORE else scores
            if not (few_rows or pipelined):
                skipped = sympy.Integer(_SKIPPED)
        elif load.masked and pipelined and not few_rows and unit in ("mma.sync", "wgmma"):
            # What the mask reads of held queries changes layout in its branch.
            conditions += 1
    if conditions:  # of several vectors they are put together before that
        exchanged += BLOCK_M * _SCORE * (1 if conditions == 1 else _SCORE)
    kept = BLOCK_M * BLOCK_N if plan.dropout and unit in KEPT_APART else sympy.Integer(0)
    return VisitedElements(ahead, exchanged, skipped, kept)
