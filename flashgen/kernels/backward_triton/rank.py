"""rank_backward: candidates of a backward kernel, most promising first, without a GPU.

The order is by the products that an SM has in flight, as measured on an H200 with 52 kernels:
products of 64 x 64 x 128 by two programs, or the equivalent, are enough. A program alone on its SM
has no products in flight while it computes its weights, which halves its merit; so does mma.sync
where wgmma or tcgen05 are available. Of programs over queries with one stage, one at a time waits
for copies; those over keys have more products for each.
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

# The stages that most kernels are fastest with; those over keys on Hopper with fewer.
_STAGES, _STAGES_OF_KEYS = 3, 2


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
    waits = kernel == "queries" and config.num_stages < 2
    computing = max(1, blocks - 1) if waits else blocks
    under_way = config.BLOCK_M * config.BLOCK_N * width * computing
    if computing < 2:
        under_way //= 2
    unit = backward_unit(plan, kernel, config, target)
    stages = _STAGES_OF_KEYS if (kernel, unit) == ("keys", "wgmma") else _STAGES
    if unit == "mma.sync" and target.family in ("hopper", "blackwell"):
        under_way //= 2
    rows = held_rows(kernel, config)
    # Operands of four bytes are read from shared memory for twice as long: more rows share a read.
    shared_reads = -rows if plan.itemsize > 2 else 0
    return (
        -min(under_way, ENOUGH),
        blocks < 2,
        rows < _ROWS * config.num_warps,
        config.num_stages < 2,
        shared_reads,
        -min(config.BLOCK_M, config.BLOCK_N),
        abs(config.num_stages - stages),
        rows,
    )
