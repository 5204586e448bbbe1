"""How many blocks of a backward kernel an SM holds, and whether a thread's values fit registers."""

from __future__ import annotations

from flashgen.budget.matrix_units import Unit
from flashgen.budget.occupancy import held_at_once
from flashgen.budget.targets import Target
from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.shared_memory import backward_unit, backward_usage, held_rows
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan

# Rows of a matrix product of one warp.
_MMA_ROWS = 16

# Rows of tensor memory, each of which has all of its columns.
_LANES = 128

# Registers for each of `backward_live_values`, and besides: fitted to what the compiler gives
# kernels that do not spill.
_REGISTERS: dict[tuple[BackwardKernel, Unit], tuple[float, int]] = {
    ("keys", "wgmma"): (1.2, 45),
    ("queries", "wgmma"): (1.0, 24),
    ("keys", "tcgen05"): (1.2, 45),
    ("queries", "tcgen05"): (1.0, 0),
    ("keys", "mma.sync"): (1.5, 60),
    ("queries", "mma.sync"): (1.5, 60),
    ("keys", "fma"): (1.5, 60),
    ("queries", "fma"): (1.5, 60),
    ("keys", "mfma"): (1.6, 0),
    ("queries", "mfma"): (1.4, 0),
}


# Registers besides for gradients of queries by wgmma: of operands of four bytes, and of the
# addresses of a third stage where rows are in several parts.
_WIDE_OPERANDS, _PARTS_AHEAD = 35, 16

# Registers that the random words of dropout take for each score, at once: p is needed after them.
_DROPOUT_REGISTERS = 1.25


def accumulated_widths(plan: KernelPlan, kernel: BackwardKernel) -> int:
    """Columns of the gradients that a program adds up."""
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    return qk + v if kernel == "keys" else qk


def backward_live_values(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> int:
    """Registers of a thread that a step cannot do without.

    Everywhere the gradients and two tiles of scores: p and dp. mma.sync also keeps the held tiles
    where each warp has rows of its own; mfma those, the next visited tiles, and operands on their
    way, and for gradients of keys p and ds in another layout.
    """
    threads = config.num_warps * target.warp_size
    rows = held_rows(kernel, config)
    visited = config.BLOCK_M + config.BLOCK_N - rows
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    words = plan.itemsize / 4
    gradients = rows * accumulated_widths(plan, kernel) / threads
    scores = config.BLOCK_M * config.BLOCK_N / threads
    held = rows * (qk + v) * words / threads
    if plan.dropout:
        gradients += _DROPOUT_REGISTERS * scores
    unit = backward_unit(plan, kernel, config, target)
    if unit == "mfma":
        ahead = visited * (qk + v) * words / threads if config.num_stages > 1 else 0
        operands = 2 * visited * max(qk, v) * words / target.warp_size
        scores *= 4 if kernel == "keys" else 2
        return round(gradients + scores + held + ahead + operands)
    live = gradients + (2 + _slopes(plan, kernel)) * scores
    if unit in ("mma.sync", "fma") and plan.qk_segments[-1] <= rows:
        # Warps share out rows, and those without any of their own have another's.
        live = (live + held) * max(1, _MMA_ROWS * config.num_warps / rows)
    return round(live)


def _slopes(plan: KernelPlan, kernel: BackwardKernel) -> int:
    """Tiles of slopes that products keep until the gradients of weights are there.

    They are those of decays: by the product of features, and by the sums that the rows read.
    """
    if not plan.products or plan.spec.score is None:
        return 0
    held = backward_plan(plan)
    return 1 + len((held.of_keys if kernel == "keys" else held.of_queries).input_gradients)


def backward_blocks(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> int:
    """The blocks of a kernel that one SM holds; 0 where not even one fits."""
    shared = backward_usage(plan, kernel, config, target).total
    unit = backward_unit(plan, kernel, config, target)
    each, besides = _REGISTERS[kernel, unit]
    registers = round(each * backward_live_values(plan, kernel, config, target)) + besides
    if (kernel, unit) == ("queries", "wgmma"):
        registers += _WIDE_OPERANDS * (plan.itemsize > 2)
        registers += _PARTS_AHEAD * (len(plan.qk_segments) > 1 and config.num_stages > 2)
    columns = backward_tensor_memory(plan, kernel, config) if unit == "tcgen05" else 0
    allotted = 1 << (columns - 1).bit_length() if columns else 0
    return held_at_once(config, target, shared, registers, allotted).blocks


def backward_tensor_memory(plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig) -> int:
    """Columns of tensor memory that a block needs: gradients, scores and dp, and p and ds as read.

    64 rows take half the lanes, and so half the columns.
    """
    rows = held_rows(kernel, config)
    visited = config.BLOCK_M + config.BLOCK_N - rows
    operands = (2 if kernel == "keys" else 1) * visited * plan.itemsize // 4
    columns = accumulated_widths(plan, kernel) + 2 * visited + operands
    return -(-columns * min(rows, _LANES) // _LANES)
