"""held_programs: how many programs of the kernels of linear attention share an SM."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.budget.occupancy import held_at_once
from flashgen.budget.targets import Target, get_target
from flashgen.config import KernelChoice, KernelConfig

#: Programs that share an SM, of those that it holds: two hide what the other waits for.
ENOUGH = 2


def held_programs(config: KernelConfig, target: Target, shared: int) -> int:
    """Programs that an SM holds at once whatever registers their threads take, `ENOUGH` at most.

    Args:
        config: the kernels' configuration.
        target: the architecture.
        shared: bytes of shared memory of a program.
    """
    held = held_at_once(config, target, shared, target.max_registers)
    return max(1, min(ENOUGH, held.blocks))


def programs_of(choice: KernelChoice) -> Mapping[str, int]:
    """`held_programs` of the configuration for each target."""
    return {
        target: held_programs(chosen.config, get_target(target), chosen.shared)
        for target, chosen in choice.configs.items()
    }
