"""heads_of_a_tile: how many heads have rows in one tile of the Gluon forward kernel."""

from __future__ import annotations

from flashgen.budget.targets import Target
from flashgen.budget.traffic import Workload
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.hopper import HopperNames


def heads_of_a_tile(plan: KernelPlan, config: KernelConfig, target: Target, work: Workload) -> int:
    """What the launcher would say of a call: a power of two, 1 where heads have their own tiles.

    Heads that share keys have rows in one tile where programs then compute at least a tenth fewer
    tiles one after another.
    """
    group = work.num_q_heads // work.num_kv_heads
    most = min(group & -group, 64)
    if most == 1 or not HopperNames(plan).packs:
        return 1
    apart, together = (_rounds(config, target, work, heads) for heads in (1, most))
    return most if 10 * together <= 9 * apart else 1


def _rounds(config: KernelConfig, target: Target, work: Workload, heads: int) -> int:
    """Tiles that a program computes one after another."""
    tiles = -(-work.q_len // (config.BLOCK_M // heads))
    return -(-tiles * work.batch * (work.num_q_heads // heads) // target.num_sms)
