"""hopper_space, rank_hopper: the configurations of the Gluon kernel for Hopper, the best first.

Beside it there is always the portable kernel: what the Gluon kernel cannot do, or does badly, is
left to that one. `why_not` says so in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from flashgen.block_lists import BlockLists
from flashgen.budget.roofline import SHARPNESS, step_clocks
from flashgen.budget.traffic import Traffic, Workload, traffic
from flashgen.config import KernelConfig
from flashgen.kernels.base import Space
from flashgen.kernels.forward_hopper.pack_gqa import heads_of_a_tile, launched
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.shape import segment_table
from flashgen.kernels.forward_hopper.shared_memory import (
    CONSUMER_REGISTERS,
    CONSUMER_ROWS,
    TARGET,
    live_registers,
    partitions,
    spills,
    visiting_rows,
    worst_hopper_usage,
)
from flashgen.kernels.workload import typical_workload, usual_lengths
from flashgen.plan import KernelPlan

#: What a spec leaves open. A second buffer lets keys arrive while others are multiplied; more than
#: four wait for nothing that would come.
USUAL = {
    "BLOCK_M": tuple(CONSUMER_ROWS * consumers for consumers in CONSUMER_REGISTERS),
    "BLOCK_N": (64, 128),
    "num_stages": (2, 3, 4),
}

# Rows of 64 take a warp group, of four warps.
ROWS_OF_A_WARP = CONSUMER_ROWS // 4

# Columns that one wgmma computes, and that one copy by TMA has, at most.
WIDEST_SEGMENT = 256

# Instructions of a step that do not depend on its columns, by machine code: those of a consumer's
# step over 64 and over 128 keys are 200 and 315 at d=128, 480 and 870 with dropout at d=64.
STEP_INSTRUCTIONS = 85

# Clocks of a step besides its instructions, in which consumers hand turns on and meet barriers; and
# of a tile of queries outside its loop, most of which runs beside the loop of another consumer.
STEP_CLOCKS = 200
TILE_CLOCKS = 1000

# Clocks that a masked step waits for elements of eight keys, where it goes through them in a loop:
# an H200 took 8,060 for a tile of 128 x 128 with flags, and 2,300 for one without a mask.
GATHER_CLOCKS = 360

# What a masked step takes longer, of any tile, for elements of keys that the producer hands over.
# With it smaller steps are as slow beside larger ones as on an H200: pictures in causal text took
# 0.117 and 1.415 ms with tiles of 192 x 64, 0.108 and 1.40 of 128 x 128 (4,096 and 16,384 tokens).
HANDED_CLOCKS = 400

# How sharply the busiest unit decides, by the number of consumers: with a third one another unit
# rarely waits for its turn.
CONSUMER_SHARPNESS = {2: SHARPNESS, 3: 3.5}


def why_not(plan: KernelPlan) -> str:
    """Why a plan has no Gluon forward kernel; ``""`` if it has one."""
    if reason := without_form(plan):
        return reason
    space = hopper_space(plan)
    if space.candidates:
        return ""
    # Of several reasons, the one for which the fewest numbers would have to change: it fails last.
    config, reason = max(space.rejected, key=lambda pair: _steps_passed(plan, pair[0]))
    return f"{config}: {reason}"


def without_form(plan: KernelPlan) -> str:
    """Why no configuration is possible; ``""`` if one may be."""
    if TARGET.name not in plan.targets:
        return f"{TARGET.name} is not among the targets"
    if plan.dropout and segment_table(plan):
        return "with dropout, tiles start at multiples of 16, not at segments"
    if plan.itemsize != 2:
        return f"{plan.torch_dtype}: its tiles are of 16-bit elements"
    widest = max(*plan.qk_segments, *plan.v_segments)
    if widest > WIDEST_SEGMENT:
        return f"{widest} columns in one piece: its instructions take {WIDEST_SEGMENT}"
    return ""


def hopper_space(plan: KernelPlan) -> Space:
    """The candidates of the Gluon kernel; none if a plan has no such kernel."""
    if without_form(plan):
        return Space((), ())
    reasons = {config: _rejects(plan, config) for config in _all(plan)}
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if not reason),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def rank_hopper(plan: KernelPlan, candidates: Iterable[KernelConfig]) -> list[KernelConfig]:
    """The candidates, fastest first, by their modelled time over the workloads of measuring.

    If the model cannot distinguish candidates, because only stages differ, the most stages first.
    """
    workloads = [typical_workload(plan, length) for length in usual_lengths(plan)]

    def seconds(config: KernelConfig) -> float:
        return math.prod(predict_hopper(plan, config, work) for work in workloads)

    return sorted(candidates, key=lambda config: (seconds(config), -config.num_stages, config))


def predict_hopper(plan: KernelPlan, config: KernelConfig, work: Workload) -> float:
    """The time of the Gluon kernel in seconds, without what its launch takes.

    One consumer computes while another waits, so a step costs what its busiest unit needs, and a
    little more where several come close; nothing waits for loads. Larger tiles are faster, as they
    have fewer steps, but for what they compute of keys that the mask hides.
    """
    heads = heads_of_a_tile(plan, config, TARGET, work)
    if plan.block_lists:
        config = launched(plan, config, work, heads)
    account = traffic(plan, config, TARGET, work, heads_of_a_tile=heads)
    costs = dict(vars(step_clocks(plan, config, TARGET, account)))
    consumers = config.BLOCK_M // CONSUMER_ROWS
    costs["arithmetic"] += STEP_INSTRUCTIONS * consumers  # one of its warps to a scheduler
    sharpness = CONSUMER_SHARPNESS[consumers]
    mean = float(sum(cost**sharpness for cost in costs.values()) ** (1 / sharpness))
    steps = _steps(plan, config, work, heads)
    clocks = steps * (mean + STEP_CLOCKS) + account.programs * TILE_CLOCKS
    clocks += steps * _share_masked(account) * _clocks_of_elements(plan, config)
    seconds = clocks / TARGET.num_sms / (TARGET.clock_ghz * 1e9)
    return max(seconds, account.dram_bytes / (TARGET.dram_gbps * 1e9))


def _steps(plan: KernelPlan, config: KernelConfig, work: Workload, heads: int) -> float:
    """Steps of all programs: a consumer that skips tiles of keys has fewer steps."""
    own = visiting_rows(plan, config)
    account = traffic(plan, own, TARGET, work, heads_of_a_tile=heads)
    return (account.full_tiles + account.masked_tiles) * own.BLOCK_M / config.BLOCK_M


def _share_masked(account: Traffic) -> float:
    tiles = account.full_tiles + account.masked_tiles
    return account.masked_tiles / max(tiles, 1)


def _clocks_of_elements(plan: KernelPlan, config: KernelConfig) -> int:
    """What a masked step takes for elements of keys, loaded eight at a time or handed over."""
    names = HopperNames(plan)
    if names.handed.columns and not names.loads_keys:
        return HANDED_CLOCKS
    at_once = names.pairs_of_wide and config.BLOCK_N == 128
    return GATHER_CLOCKS * config.BLOCK_N // 8 if names.gathers_bits and not at_once else 0


def _all(plan: KernelPlan) -> Iterator[KernelConfig]:
    """The product of the spec's choices and, where it makes none, of the usual numbers."""
    chosen = {name: plan.spec.blocks.choices(name) or values for name, values in USUAL.items()}
    for block_m, block_n, stages in product(*chosen.values()):
        for warps in plan.spec.blocks.choices("num_warps") or (block_m // ROWS_OF_A_WARP,):
            yield KernelConfig(block_m, block_n, warps, stages)


def _rejects(plan: KernelPlan, config: KernelConfig) -> str:
    """Why a configuration is no candidate, by the first rule that says so; ``""`` for none."""
    return next(filter(None, (rule(plan, config) for rule in RULES)), "")


def _steps_passed(plan: KernelPlan, config: KernelConfig) -> int:
    """How many rules a rejected configuration passes before one turns it down."""
    return next(i for i, rule in enumerate(RULES) if rule(plan, config))


def _no_such_rows(plan: KernelPlan, config: KernelConfig) -> str:
    if config.BLOCK_M not in USUAL["BLOCK_M"]:
        rows = " or ".join(map(str, USUAL["BLOCK_M"]))
        return f"it computes {rows} query rows at a time"
    return ""


def _no_such_warps(plan: KernelPlan, config: KernelConfig) -> str:
    needed = config.BLOCK_M // ROWS_OF_A_WARP
    return f"{config.BLOCK_M} query rows take {needed} warps" if config.num_warps != needed else ""


def _no_second_stage(plan: KernelPlan, config: KernelConfig) -> str:
    if config.num_stages < 2:
        return "one stage loads no keys while others are multiplied"
    return ""


def _lists_powers_of_two(plan: KernelPlan, config: KernelConfig) -> str:
    if plan.listing and not plan.classifies and config.BLOCK_M & (config.BLOCK_M - 1):
        return "key tiles are listed for query tiles whose rows are a power of two"
    return ""


def _holds_several_lists(plan: KernelPlan, config: KernelConfig) -> str:
    """A tile then lies in one block of queries, and tiles of keys are what that has chosen."""
    if plan.block_lists and config.BLOCK_M & (config.BLOCK_M - 1) and not HopperNames(plan).rests:
        return "tiles of queries lie in one block of them if their rows are a power of two"
    lists = [param.block for param in plan.params if isinstance(param, BlockLists)]
    if lists and max(64, min(lists)) < config.BLOCK_N:
        return "a tile of keys would hold blocks that are not chosen"
    return ""


def _rows_are_chosen(plan: KernelPlan, config: KernelConfig) -> str:
    """With three consumers the launcher has tiles of two where those are as few."""
    if plan.spec.blocks.choices("BLOCK_M") or not HopperNames(plan).rests:
        return ""
    rows = max(USUAL["BLOCK_M"])
    longer = replace(config, BLOCK_M=rows, num_warps=rows // ROWS_OF_A_WARP)
    if rows > config.BLOCK_M and not _rejects(plan, longer):
        return f"BLOCK_M={rows} takes {config.BLOCK_M} rows where a call has as few tiles of them"
    return ""


def _spills(plan: KernelPlan, config: KernelConfig) -> str:
    if spills(plan, config):
        live, limit = live_registers(plan, config), partitions(config)[0].registers
        return f"a step keeps {live} of a consumer's {limit} registers busy: it would spill"
    return ""


def _does_not_fit(plan: KernelPlan, config: KernelConfig) -> str:
    return worst_hopper_usage(plan, config).shortage(TARGET.name)


#: Why not, from what the kernel is made for to what it needs.
RULES = (
    _no_such_rows,
    _no_such_warps,
    _no_second_stage,
    _lists_powers_of_two,
    _holds_several_lists,
    _spills,
    _does_not_fit,
    _rows_are_chosen,
)
