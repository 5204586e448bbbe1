"""Which configuration a module ships for each target and kernel, and on what grounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashgen.budget.targets import get_target
from flashgen.config import (
    BACKWARD_FORMS,
    BACKWARD_KERNELS,
    HOPPER,
    BackwardConfigs,
    BackwardKernel,
    ChosenConfig,
    Form,
    HopperChoice,
    KernelConfig,
)
from flashgen.kernels.backward_hopper.shared_memory import hopper_backward_usage
from flashgen.kernels.backward_hopper.space import rank_hopper_backward
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import why_no_backward
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.shared_memory import backward_usage
from flashgen.kernels.base import Space
from flashgen.kernels.forward_hopper.shared_memory import hopper_usage
from flashgen.kernels.forward_hopper.space import rank_hopper, why_not
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.spec import Blocks
from flashgen.tuning.store import Measurement, TuneResult, best_for


def choose(
    plan: KernelPlan, kernel: str, spaces: Mapping[str, Space], results: Iterable[TuneResult]
) -> dict[str, ChosenConfig]:
    """The portable kernel's configurations: for each target the best measured, else the model's.

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


def choose_hopper(
    plan: KernelPlan,
    kernel: str,
    portable: str,
    space: Space | None,
    results: Iterable[TuneResult],
) -> HopperChoice:
    """The Gluon kernel's configuration by the same rule, or why a module does without the kernel.

    Where both kernels were measured on one GPU, the portable one may turn out to be faster.

    Args:
        plan: what it computes.
        kernel: the digest of the Gluon kernel's source.
        portable: that of the portable kernel's.
        space: its candidates, perhaps none; None where Hopper is no target.
        results: what was measured, on any machine.
    """
    results = tuple(results)
    if space is None:
        return HopperChoice()
    if not space.candidates:
        return HopperChoice(why_not=why_not(plan))
    best = best_for(results, HOPPER, kernel, plan.spec.blocks)
    other = best_for(results, HOPPER, portable, plan.spec.blocks)
    if best and other and _compares(best[0], other[0]):
        rate, portable_rate = best[1].tflops[-1], other[1].tflops[-1]
        if rate < portable_rate:
            return HopperChoice(
                why_not=f"on {best[0].gpu} it reached {rate:.0f} TFLOP/s, "
                f"the portable kernel {portable_rate:.0f}"
            )
    config = best[1].config if best else rank_hopper(plan, space.candidates)[0]
    return HopperChoice(_chosen(config, hopper_usage(plan, config).total, best))


def choose_backward(
    plan: KernelPlan,
    kernels: Mapping[Form, str],
    spaces: Mapping[str, Mapping[BackwardKernel, Space]],
    results: Iterable[TuneResult],
) -> dict[str, BackwardConfigs]:
    """The backward kernels' configurations by the same rule, for targets with tiles for both.

    Args:
        plan: the forward's.
        kernels: the digests of their sources.
        spaces: the candidates for each target and kernel.
        results: what was measured, on any machine.
    """
    results = tuple(results)

    def best(kernel: BackwardKernel, target: str) -> ChosenConfig:
        # A spec's pins are of the forward kernel.
        found = best_for(results, target, kernels[BACKWARD_FORMS[kernel]], Blocks())
        candidates = spaces[target][kernel].candidates
        config = found[1].config if found else rank_backward(plan, kernel, target, candidates)[0]
        shared = backward_usage(plan, kernel, config, get_target(target)).total
        return _chosen(config, shared, found)

    return {
        target: BackwardConfigs(keys=best("keys", target), queries=best("queries", target))
        for target, of in spaces.items()
        if all(of[kernel].candidates for kernel in BACKWARD_KERNELS)
    }


def choose_hopper_backward(
    plan: KernelPlan,
    kernels: Mapping[Form, str],
    space: Space | None,
    results: Iterable[TuneResult],
) -> HopperChoice:
    """The Gluon kernel of the backward pass by the same rule, or why a module does without it.

    Where all were measured on one GPU, the portable kernels in whose place it runs may turn out to
    be faster together.

    Args:
        plan: the forward's.
        kernels: the digests of their sources.
        space: its candidates, perhaps none; None where Hopper is no target.
        results: what was measured, on any machine.
    """
    results = tuple(results)
    if space is None:
        return HopperChoice()
    names = HopperBackwardSplit(backward_plan(plan))
    if not space.candidates:
        return HopperChoice(why_not=why_no_backward(names))
    best = best_for(results, HOPPER, kernels["hopper_backward"], Blocks())
    forms = [BACKWARD_FORMS[kernel] for kernel in names.replaces]
    portable = [best_for(results, HOPPER, kernels[form], Blocks()) for form in forms]
    if best and all(other and _compares(best[0], other[0]) for other in portable):
        ms, portable_ms = best[1].ms[-1], sum(other[1].ms[-1] for other in portable if other)
        if ms > portable_ms:
            return HopperChoice(
                why_not=f"on {best[0].gpu} it took {ms:.3g} ms, "
                f"the portable kernel{'s' * (len(forms) > 1)} {portable_ms:.3g}"
            )
    config = best[1].config if best else rank_hopper_backward(space.candidates)[0]
    shared = hopper_backward_usage(names, config).total
    return HopperChoice(_chosen(config, shared, best), replaces=names.replaces)


def _compares(one: TuneResult, other: TuneResult) -> bool:
    """Whether times of two results are of one GPU, Triton and length."""
    return one.key[:2] == other.key[:2] and one.lengths == other.lengths


def _measured(
    plan: KernelPlan, target: str, kernel: str, results: tuple[TuneResult, ...]
) -> ChosenConfig | None:
    best = best_for(results, target, kernel, plan.spec.blocks)
    if best is None:
        return None
    config = best[1].config
    return _chosen(config, sram_usage(plan, config, get_target(target)).total, best)


def _ranked(plan: KernelPlan, target: str, space: Space) -> ChosenConfig:
    config, _ = rank(plan, target, space.candidates)[0]
    return _chosen(config, sram_usage(plan, config, get_target(target)).total, None)


def _chosen(
    config: KernelConfig, shared: int, best: tuple[TuneResult, Measurement] | None
) -> ChosenConfig:
    """With what was measured of the configuration, None where it is the model's choice."""
    if best is None:
        return ChosenConfig(config=config, source="model", shared=shared)
    result, measurement = best
    return ChosenConfig(
        config=config,
        source="measured",
        shared=shared,
        gpu=result.gpu,
        triton=result.triton,
        tflops=measurement.tflops[-1],
    )
