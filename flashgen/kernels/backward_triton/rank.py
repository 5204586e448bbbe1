"""rank_backward: candidates of a backward kernel, most promising first, without a GPU.

The order is by the products that an SM has in flight, as measured on an H200 with 15 kernels:
products of 64 x 64 x 128 by two programs, or the equivalent, are enough. A program alone on its SM
has no products in flight while it computes its weights, which halves its merit; so does mma.sync
where wgmma or tcgen05 are available.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.budget.targets import Target, get_target
from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.occupancy import backward_blocks
from flashgen.kernels.backward_triton.shared_memory import backward_unit, held_rows
from flashgen.plan import KernelPlan

# Multiply-adds of one product, over all programs of an SM: more of them gain nothing.
ENOUGH = 2**20

# Rows of one matrix product.
_ROWS = 16


def rank_backward(
    plan: KernelPlan, kernel: BackwardKernel, target: str, candidates: Iterable[KernelConfig]
) -> list[KernelConfig]:
    """The candidates, most promising first."""
    architecture = get_target(target)
    return sorted(candidates, key=lambda config: _merits(plan, kernel, config, architecture))


def _merits(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> tuple[float, ...]:
    """The sort key of a configuration, most important first; less is better."""
    blocks = backward_blocks(plan, kernel, config, target)
    width = max(sum(plan.qk_segments), sum(plan.v_segments))
    under_way = config.BLOCK_M * config.BLOCK_N * width * blocks
    if blocks < 2:
        under_way //= 2
    slow = backward_unit(plan, kernel, config, target) == "mma.sync"
    if slow and target.family in ("hopper", "blackwell"):
        under_way //= 2
    rows = held_rows(kernel, config)
    return (
        -min(under_way, ENOUGH),
        blocks < 2,
        rows < _ROWS * config.num_warps,
        config.num_stages < 2,
        -min(config.BLOCK_M, config.BLOCK_N),
        -config.num_stages,
        rows,
    )
