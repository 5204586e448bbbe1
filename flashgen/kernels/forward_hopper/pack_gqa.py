"""heads_of_a_tile, launched: the choices of the Gluon forward kernel's launcher for a call."""

from __future__ import annotations

from dataclasses import replace

from flashgen.budget.matrix_units import WARP_GROUP
from flashgen.budget.targets import Target
from flashgen.budget.traffic import Workload
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.shape import segment_table
from flashgen.kernels.forward_hopper.shared_memory import CONSUMER_ROWS, TARGET
from flashgen.plan import KernelPlan
from flashgen.plan.classified import ClassifiedTiles


def heads_of_a_tile(plan: KernelPlan, config: KernelConfig, target: Target, work: Workload) -> int:
    """The launcher's number of heads in a tile: a power of two, 1 for separate tiles.

    Heads that share keys have rows in one tile if programs then compute at least a tenth fewer
    tiles one after another; and always if they share lists of blocks.
    """
    group = work.num_q_heads // work.num_kv_heads
    most = min(group & -group, 64)
    if most == 1 or not HopperNames(plan).packs:
        return 1
    if plan.block_lists:
        return most
    apart, together = (_rounds(config, target, work, heads) for heads in (1, most))
    return most if 10 * together <= 9 * apart else 1


def launched(plan: KernelPlan, config: KernelConfig, work: Workload, heads: int) -> KernelConfig:
    """The configuration of a call: with two consumers if a third one would save no tile.

    Args:
        plan: the kernel.
        config: the module's configuration.
        work: the call.
        heads: `heads_of_a_tile` of them.
    """
    rows = 2 * CONSUMER_ROWS
    if segment_table(plan) or rows >= config.BLOCK_M:
        return config
    if HopperNames(plan).shares_lists:
        two = _rounds_of_lists(plan, work, rows, heads)
        if two > _rounds_of_lists(plan, work, config.BLOCK_M, heads):
            return config
    elif _tiles(work, rows // heads) > _tiles(work, config.BLOCK_M // heads):
        return config
    return replace(config, BLOCK_M=rows, num_warps=2 * WARP_GROUP)


def _rounds(config: KernelConfig, target: Target, work: Workload, heads: int) -> int:
    """Tiles that a program computes one after another."""
    tiles = _tiles(work, config.BLOCK_M // heads)
    return -(-tiles * work.batch * (work.num_q_heads // heads) // target.num_sms)


def _rounds_of_lists(plan: KernelPlan, work: Workload, rows: int, heads: int) -> int:
    """The same of tiles that lie within the queries of a list of blocks."""
    assert isinstance(plan.listing, ClassifiedTiles)
    listed = max(2 * CONSUMER_ROWS // heads, plan.listing.rows)
    whole, rest = divmod(work.q_len, listed)
    tiles = whole * -(-listed // (rows // heads)) + -(-rest // (rows // heads))
    return -(-tiles * work.batch * (work.num_q_heads // heads) // TARGET.num_sms)


def _tiles(work: Workload, rows: int) -> int:
    """The number of tiles of a head's queries, with `rows` queries each."""
    return -(-work.q_len // rows)
