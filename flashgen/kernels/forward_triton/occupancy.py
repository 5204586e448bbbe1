"""How many blocks of the kernel an SM holds, and whether a thread's values fit its registers."""

from __future__ import annotations

from flashgen.budget.matrix_units import Unit, matrix_unit
from flashgen.budget.occupancy import Occupancy, held_at_once
from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan import KernelPlan
from flashgen.plan.step_cost import tile_loads

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


def occupancy(plan: KernelPlan, config: KernelConfig, target: Target) -> Occupancy:
    """The blocks of a kernel that one SM holds; 0 where not even one fits."""
    columns = 0
    if matrix_unit(plan, config, target) == "tcgen05":
        columns = tensor_memory_columns(plan, config)
    shared = sram_usage(plan, config, target).total
    return held_at_once(config, target, shared, registers_needed(plan, config, target), columns)


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
