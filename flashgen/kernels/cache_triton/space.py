"""cache_space: the configurations of the cache kernel; for_many_rows: the one of long queries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashgen.budget.targets import Target, get_target
from flashgen.config import KernelConfig
from flashgen.kernels.base import Space
from flashgen.kernels.cache_triton.shared_memory import cache_usage
from flashgen.plan import KernelPlan

#: Rows of a tile: a query's heads that share keys, and up to four queries of four such heads.
FEW_ROWS = 16

#: Rows of a tile of more queries: reading a prompt in pieces, or a tree of drafts. Each tile reads
#: all keys that its queries see, so the rate of such calls grows with its rows.
MANY_ROWS = (128, 64, 32)

#: A thread's most float32 outputs: with more, it would spill.
MOST_OUTPUTS = 64

#: Its warps, keys and most stages: more did not pay on an H100 (docs/lab/cache.md).
MANY_WARPS, MANY_KEYS, MANY_STAGES = 8, (64, 32, 16), 3

BLOCKS_N = (16, 32, 64, 128)
STAGES = {"cuda": (2, 3, 4), "hip": (2,)}


def cache_space(plan: KernelPlan, target: str) -> Space:
    """The candidates on a target: tiles of `FEW_ROWS`."""
    architecture = get_target(target)
    reasons = {config: _unfit(plan, config, architecture) for config in _all(architecture)}
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if not reason),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def for_many_rows(plan: KernelPlan, config: KernelConfig, target: Target) -> KernelConfig:
    """The configuration beside one of few rows: as many rows, keys, then stages as fit."""
    most_rows = MOST_OUTPUTS * MANY_WARPS * 32 // sum(plan.v_segments)
    rows_that_fit = [rows for rows in MANY_ROWS if rows <= most_rows]
    keys = [n for n in MANY_KEYS if n <= config.BLOCK_N]
    stages = range(min(config.num_stages, MANY_STAGES), 1, -1)
    for rows, block_n, num_stages in product(rows_that_fit, keys, stages):
        wider = KernelConfig(rows, block_n, MANY_WARPS, num_stages)
        if cache_usage(plan, wider, target, paged=True).fits:
            return wider
    return config


def _all(target: Target) -> Iterator[KernelConfig]:
    for block_n, stages in product(BLOCKS_N, STAGES[target.backend]):
        yield KernelConfig(FEW_ROWS, block_n, 4, stages)


def _unfit(plan: KernelPlan, config: KernelConfig, target: Target) -> str:
    if shortage := cache_usage(plan, config, target, paged=True).shortage(target.name):
        return shortage
    threads = config.num_warps * target.warp_size
    narrowest = min(*plan.qk_segments, *plan.v_segments)
    share = config.BLOCK_N * narrowest * plan.itemsize / threads
    if share < 4:
        return (
            f"a thread's share of {config.BLOCK_N} x {narrowest} keys is {share:g} bytes; "
            "asynchronous copies move 4 at least"
        )
    return ""
