"""How many blocks of a kernel an SM holds at once, and whether a thread's values fit its registers.

Blocks that share an SM overlap: one computes its softmax while another multiplies. What limits
them is shared memory, registers, threads and, on Blackwell, tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.budget.quantities import Unit
from flashgen.budget.sram import matrix_unit, sram_usage
from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.inner import tile_loads

# Tensor memory of an SM (PTX ISA, "Tensor Memory"): 512 columns, allotted in powers of two.
TENSOR_MEMORY_COLUMNS = 512

# Registers come in units of 8 a thread (CUDA occupancy calculator).
REGISTER_UNIT = 8

# A thread also holds pointers, row statistics and operands on their way.
SPARE_REGISTERS = 26

# Registers that a step cannot do without for each score whose element of a tensor is loaded, at
# once for all of a thread's. wgmma and tcgen05 leave room for addresses. mma.sync does not: they
# take two, and the elements are there in two layouts. So are scores and weights with mfma.
ELEMENT_REGISTERS: dict[Unit, int] = {"wgmma": 1, "tcgen05": 1, "mma.sync": 4, "fma": 4, "mfma": 7}

# Registers that such a load takes where there are some: as many loads under way as possible.
GENEROUS_ELEMENT_REGISTERS = 3.5


# Those that the random words of dropout take for each score, at once.
DROPOUT_REGISTERS = 0.25


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
    columns = 0
    if matrix_unit(plan, config, target) == "tcgen05":
        columns = tensor_memory_columns(plan, config)
    shared = sram_usage(plan, config, target).total
    return held_at_once(config, target, shared, registers_needed(plan, config, target), columns)


def held_at_once(
    config: KernelConfig, target: Target, shared: int, registers: int, columns: int = 0
) -> Occupancy:
    """The blocks that one SM holds of what each needs.

    Args:
        config: of the kernel.
        target: the architecture.
        shared: bytes of shared memory of a block.
        registers: of a thread, as far as there are so many.
        columns: of tensor memory, where the kernel uses it.
    """
    threads = config.num_warps * target.warp_size
    registers = min(registers, register_limit(config, target))
    registers = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    bounds = {
        "shared memory": target.shared_per_sm // (shared + target.reserved_shared),
        "registers": target.registers_per_sm // (registers * threads),
        "threads": target.max_threads_per_sm // threads,
        "blocks": target.max_blocks_per_sm,
    }
    if columns:
        bounds["tensor memory"] = TENSOR_MEMORY_COLUMNS // columns
    limit = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[limit], limit)


def register_limit(config: KernelConfig, target: Target) -> int:
    """Registers that a thread can have: what it can address, or its share of the SM's."""
    threads = config.num_warps * target.warp_size
    return min(target.max_registers, target.registers_per_sm // threads)


def live_values(plan: KernelPlan, config: KernelConfig, target: Target) -> int:
    """Registers of a thread that a loop step cannot do without.

    Everywhere the accumulator (which tcgen05 fetches to rescale it) and the scores, and what is
    loaded for each of them. mma.sync has the weights beside the scores for a while. mfma also keeps
    the queries, the next keys, and the keys that a warp is at.
    """
    threads = config.num_warps * target.warp_size
    accumulator = config.BLOCK_M * sum(plan.v_segments) // threads
    scores = config.BLOCK_M * config.BLOCK_N // threads
    unit = matrix_unit(plan, config, target)
    if loads_elements(plan):
        accumulator += ELEMENT_REGISTERS[unit] * scores
    if plan.dropout:
        accumulator += round(DROPOUT_REGISTERS * scores)
    if unit in ("wgmma", "tcgen05"):
        return accumulator + scores
    if unit != "mfma":
        return accumulator + scores + scores * plan.itemsize // 4
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    queries = config.BLOCK_M * qk * plan.itemsize // 4 // threads
    ahead = config.BLOCK_N * (qk + v) * plan.itemsize // 4 // threads
    operand = config.BLOCK_N * max(qk, v) * plan.itemsize // 4 // target.warp_size
    return accumulator + scores + queries + operand + (ahead if config.num_stages > 1 else 0)


def registers_needed(plan: KernelPlan, config: KernelConfig, target: Target) -> int:
    """Registers of a thread, fitted to what the compiler gives kernels that do not spill."""
    threads = config.num_warps * target.warp_size
    accumulator = config.BLOCK_M * sum(plan.v_segments) // threads
    scores = config.BLOCK_M * config.BLOCK_N // threads
    loads = GENEROUS_ELEMENT_REGISTERS * scores if loads_elements(plan) else 0
    loads += DROPOUT_REGISTERS * scores if plan.dropout else 0
    unit = matrix_unit(plan, config, target)
    if unit == "wgmma":
        needed = accumulator + 1.5 * scores + max(0, accumulator - 64) / 2 + SPARE_REGISTERS
    elif unit == "tcgen05":
        needed = accumulator + 2 * scores + 4
    elif unit == "mfma":
        return round(1.4 * live_values(plan, config, target)) + 20
    else:  # operands pass through registers as well
        needed = 1.3 * accumulator + 3.2 * scores + 40
    return round(needed + loads)


def loads_elements(plan: KernelPlan) -> bool:
    """Whether a step loads an element of some tensor for each score."""
    return any(load.over == "scores" for load in tile_loads(plan))


def tensor_memory_columns(plan: KernelPlan, config: KernelConfig) -> int:
    """Columns of tensor memory that a block gets: accumulator, scores, and weights beside them."""
    columns = sum(plan.v_segments) + config.BLOCK_N + config.BLOCK_N * plan.itemsize // 4
    return 1 << (columns - 1).bit_length()
