"""The instructions that multiply tiles, and Triton's choice among them."""

from __future__ import annotations

from typing import Literal

from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan

#: The instructions that multiply tiles; ``"fma"`` are the ordinary ones.
Unit = Literal["mma.sync", "wgmma", "tcgen05", "mfma", "fma"]

#: Units that leave scores of positions 8 apart with several threads.
KEPT_APART: tuple[Unit, ...] = ("tcgen05", "mfma")

# tcgen05 and wgmma work on 64 rows, by the four warps of a group.
WARP_GROUP_ROWS = 64
WARP_GROUP = 4

# The shortest side of a tile that matrix units take.
SMALLEST_SIDE = 16


def matrix_unit(plan: KernelPlan, config: KernelConfig, target: Target) -> Unit:
    """The instruction that Triton multiplies the tiles with."""
    if target.family == "cdna3":
        return "mfma"
    if plan.input_precision == "ieee":
        return "fma"
    if config.BLOCK_M >= WARP_GROUP_ROWS and config.num_warps >= WARP_GROUP:
        if target.family == "hopper":
            return "wgmma"
        if target.family == "blackwell":
            return "tcgen05"
    return "mma.sync"
