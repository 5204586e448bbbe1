"""How many blocks of a kernel an SM holds at once, and whether a thread's values fit its registers.

Blocks that share an SM overlap: one computes its softmax while another multiplies. What limits
them is shared memory, registers, threads and, on Blackwell, tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.budget.targets import Target
from flashgen.config import KernelConfig

# Tensor memory of an SM (PTX ISA, "Tensor Memory"): 512 columns, allotted in powers of two.
TENSOR_MEMORY_COLUMNS = 512

# Registers come in units of 8 a thread (CUDA occupancy calculator).
REGISTER_UNIT = 8


@dataclass(frozen=True)
class Occupancy:
    """Blocks that an SM holds at once.

    Attributes:
        blocks: how many.
        limit: the resource that limits the number.
    """

    blocks: int
    limit: str


def held_at_once(
    config: KernelConfig, target: Target, shared: int, registers: int, columns: int = 0
) -> Occupancy:
    """The blocks that one SM holds, by the resources of a block.

    Args:
        config: the kernel's configuration.
        target: the architecture.
        shared: bytes of shared memory of a block.
        registers: registers of a thread, capped at the most that it can have.
        columns: columns of tensor memory, if the kernel uses it.
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
