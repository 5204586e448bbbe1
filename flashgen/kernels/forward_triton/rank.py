"""rank, predict: candidates in the order of their modelled time, for building without a GPU.

Inside one program the units of an SM take turns, products, then softmax, and a wait where the next
keys are still on their way; other programs on the same SM fill the gaps. So a step costs what its
busiest unit needs, as `flashgen.budget.roofline` has it, or its turns divided by the programs that
overlap, and a little more than either where several come close. L2 sets a floor to a step, DRAM to
the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.budget.roofline import SHARPNESS, Step, step_clocks
from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload, traffic
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.occupancy import occupancy
from flashgen.kernels.workload import typical_workload, usual_lengths
from flashgen.plan import KernelPlan

# Clocks from asking for a tile to having it, and of a program outside its loop.
LOAD_CLOCKS = 1600
PROGRAM_CLOCKS = 2500

# Two warp groups of one program drift apart a little, as if there were so many programs.
TWO_GROUPS = 1.5


def rank(
    plan: KernelPlan, target: str, candidates: Iterable[KernelConfig]
) -> list[tuple[KernelConfig, float]]:
    """The candidates, fastest first, each with its modelled time in seconds.

    The time is the geometric mean over the workloads that measuring uses too.
    """
    architecture = get_target(target)
    workloads = [typical_workload(plan, length) for length in usual_lengths(plan)]

    def seconds(config: KernelConfig) -> float:
        times = [predict(plan, config, architecture, work).seconds for work in workloads]
        return math.prod(times) ** (1 / len(times))

    ranked = [(config, seconds(config)) for config in candidates]
    # Of configurations that the model cannot tell apart, three stages did best.
    return sorted(ranked, key=lambda pair: (pair[1], abs(pair[0].num_stages - 3), pair[0]))


@dataclass(frozen=True)
class Prediction:
    """The modelled time of one call.

    Attributes:
        seconds: of the call.
        bound: what it waits for most: a field of `Step`, ``"turns"`` or ``"dram"``.
        step: where the clocks of the loop go.
        programs: query tiles that share an SM.
    """

    seconds: float
    bound: str
    step: Step
    programs: int


def predict(plan: KernelPlan, config: KernelConfig, target: Target, work: Workload) -> Prediction:
    """The time of a kernel on a target, from its instructions and bytes.

    Raises:
        ValueError: the configuration does not fit the target.
    """
    programs = occupancy(plan, config, target).blocks
    if not programs:
        raise ValueError(f"{config} does not fit {target.name}")
    account = traffic(plan, config, target, work)
    overlap = programs * _drift(plan, config)
    step = step_clocks(plan, config, target, account)
    wait = max(0.0, LOAD_CLOCKS - (config.num_stages - 1) * step.turn)
    costs = {**vars(step), "turns": (step.turn + wait) / overlap}
    floor = costs.pop("l2")
    mean = float(sum(cost**SHARPNESS for cost in costs.values()) ** (1 / SHARPNESS))
    steps = account.full_tiles + account.masked_tiles
    clocks = steps * max(floor, mean) + account.programs * PROGRAM_CLOCKS / overlap
    seconds = clocks / target.num_sms / (target.clock_ghz * 1e9)
    dram = account.dram_bytes / (target.dram_gbps * 1e9)
    bound = "l2" if floor > mean else max(costs, key=lambda name: costs[name])
    return Prediction(max(seconds, dram), "dram" if dram > seconds else bound, step, programs)


def _drift(plan: KernelPlan, config: KernelConfig) -> float:
    """The programs that one program overlaps like; transposing keeps its warps together."""
    return TWO_GROUPS if config.num_warps > 4 and plan.input_precision != "tf32" else 1.0
