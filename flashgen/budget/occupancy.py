"""How many blocks of a kernel an SM holds at once, and whether a thread's values fit its registers.

Blocks that share an SM overlap: one computes its softmax while another multiplies. What limits
them is shared memory, registers, threads and, on Blackwell, tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.budget.sram import matrix_unit, sram_usage
from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan

# Tensor memory of an SM (PTX ISA, "Tensor Memory"): 512 columns, allotted in powers of two.
TENSOR_MEMORY_COLUMNS = 512

# Registers come in units of 8 a thread (CUDA occupancy calculator).
REGISTER_UNIT = 8

# A thread also holds pointers, row statistics and operands on their way.
SPARE_REGISTERS = 26


@dataclass(frozen=True)
class Occupancy:
    """Blocks that an SM holds at once.

    Attributes:
        blocks: how many.
        limit: what there would have to be more of for another one.
    """

    blocks: int
    limit: str


def occupancy(plan: KernelPlan, config: KernelConfig, target: Target) -> Occupancy:
    """The blocks of a kernel that one SM holds; 0 where not even one fits."""
    threads = config.num_warps * target.warp_size
    shared = sram_usage(plan, config, target).total + target.reserved_shared
    registers = min(registers_needed(plan, config, target), target.max_registers)
    registers = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    bounds = {
        "shared memory": target.shared_per_sm // shared,
        "registers": target.registers_per_sm // (registers * threads),
        "threads": target.max_threads_per_sm // threads,
        "blocks": target.max_blocks_per_sm,
    }
    if matrix_unit(plan, config, target) == "tcgen05":
        bounds["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_memory_columns(plan, config)
    limit = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[limit], limit)


def live_values(plan: KernelPlan, config: KernelConfig, target: Target) -> int:
    """Registers of a thread that a loop step cannot do without: accumulator, scores, weights.

    wgmma reads the weights from the registers of the scores, which they replace; mma.sync has both
    for a while. tcgen05 keeps the accumulator in tensor memory.
    """
    threads = config.num_warps * target.warp_size
    unit = matrix_unit(plan, config, target)
    accumulator = 0 if unit == "tcgen05" else config.BLOCK_M * sum(plan.v_segments) // threads
    scores = config.BLOCK_M * config.BLOCK_N // threads
    weights = 0 if unit == "wgmma" else scores * plan.itemsize // 4
    return accumulator + scores + weights


def registers_needed(plan: KernelPlan, config: KernelConfig, target: Target) -> int:
    """Registers of a thread, estimated from what the compiler gives kernels that do not spill."""
    threads = config.num_warps * target.warp_size
    accumulator = config.BLOCK_M * sum(plan.v_segments) // threads
    scores = config.BLOCK_M * config.BLOCK_N // threads
    unit = matrix_unit(plan, config, target)
    if unit == "wgmma":
        return round(accumulator + 1.5 * scores + max(0, accumulator - 64) / 2) + SPARE_REGISTERS
    if unit == "mma.sync":  # operands pass through registers as well
        return round(1.3 * accumulator + 3.2 * scores) + 40
    return live_values(plan, config, target) + SPARE_REGISTERS


def tensor_memory_columns(plan: KernelPlan, config: KernelConfig) -> int:
    """Columns of tensor memory that a block gets: accumulator, scores, and weights beside them."""
    columns = sum(plan.v_segments) + config.BLOCK_N + config.BLOCK_N * plan.itemsize // 4
    return 1 << (columns - 1).bit_length()
