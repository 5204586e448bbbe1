"""rank: candidates in the order of their modelled time, for building without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flashgen.budget.roofline import predict
from flashgen.budget.targets import get_target
from flashgen.budget.traffic import Workload
from flashgen.config import KernelConfig
from flashgen.params import Tensor
from flashgen.plan import KernelPlan
from flashgen.tuning.typical import TypicalRowTable, TypicalTensor, typical_number
from flashgen.tuning.workload import TOKENS, usual_heads, usual_lengths


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


def typical_workload(plan: KernelPlan, length: int) -> Workload:
    """Self-attention of a training step in sequences of one length."""
    heads = usual_heads(plan)
    values: dict[str, Any] = {
        param.name: TypicalTensor(param) if isinstance(param, Tensor) else typical_number(param)
        for param in plan.params
    }
    values |= {constant.name: constant.elements for constant in plan.spec.constants}
    values |= {table.name: TypicalRowTable(table.side) for table in plan.row_tables}
    return Workload(TOKENS // length, heads, heads, length, length, tuple(values.items()))
