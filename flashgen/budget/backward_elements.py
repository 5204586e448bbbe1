"""What a block of a backward kernel holds in shared memory because its loop reads tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

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
    """

    ahead: Any = sympy.Integer(0)
    exchanged: Any = sympy.Integer(0)
    skipped: Any = sympy.Integer(0)


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
    for load in tile_loads(plan):
        copies = copied and load.itemsize >= _SCORE
        if load.over == "scores":
            ahead += BLOCK_M * BLOCK_N * load.itemsize if copies else 0
            # What they learn is exchanged as well, on its way to memory.
            times = 2 if kernel == "queries" else 1
            exchanged += times * BLOCK_M * BLOCK_N * _SCORE
        elif load.over == ("rows" if kernel == "keys" else "columns"):
            ahead += visited * load.itemsize if copies else 0
            if load.over == "rows" and not few_rows and not pipelined:
                skipped = sympy.Integer(_SKIPPED)
            if load.over == "columns" or load.itemsize < _SCORE:
                exchanged = sympy.Max(exchanged, BLOCK_M * BLOCK_N * _SCORE)
        elif load.over == "rows":
            # What the mask reads of held queries changes layout in its branch.
            if load.masked and pipelined and not few_rows and unit in ("mma.sync", "wgmma"):
                exchanged = sympy.Max(exchanged, BLOCK_M * _SCORE)
    return VisitedElements(ahead, exchanged, skipped)
