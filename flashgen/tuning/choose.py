"""Which configuration a module ships for each of its targets, and on what grounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashgen.budget.sram import sram_usage
from flashgen.budget.targets import get_target
from flashgen.config import ChosenConfig
from flashgen.plan import KernelPlan
from flashgen.tuning.rank import rank
from flashgen.tuning.space import Space
from flashgen.tuning.store import TuneResult, best_for


def choose(
    plan: KernelPlan, kernel: str, spaces: Mapping[str, Space], results: Iterable[TuneResult]
) -> dict[str, ChosenConfig]:
    """The best measured configuration of each target, or the model's first where none was.

    Args:
        plan: the kernel.
        kernel: the digest of its source.
        spaces: the candidates for each target, none of them empty.
        results: what was measured, on any machine.
    """
    results = tuple(results)
    return {
        target: _measured(plan, target, kernel, results) or _ranked(plan, target, space)
        for target, space in spaces.items()
    }


def _measured(
    plan: KernelPlan, target: str, kernel: str, results: tuple[TuneResult, ...]
) -> ChosenConfig | None:
    best = best_for(results, target, kernel, plan.spec.blocks)
    if best is None:
        return None
    result, measurement = best
    return ChosenConfig(
        config=measurement.config,
        source="measured",
        shared=sram_usage(plan, measurement.config, get_target(target)).total,
        gpu=result.gpu,
        triton=result.triton,
        tflops=measurement.tflops[-1],
    )


def _ranked(plan: KernelPlan, target: str, space: Space) -> ChosenConfig:
    config, _ = rank(plan, target, space.candidates)[0]
    shared = sram_usage(plan, config, get_target(target)).total
    return ChosenConfig(config=config, source="model", shared=shared)
