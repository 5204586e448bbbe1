"""The configuration that a module ships for each kernel and target, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from flashgen.budget.targets import get_target
from flashgen.config import ChosenConfig, KernelChoice, KernelConfig
from flashgen.kernels.base import Kernel, Space
from flashgen.kernels.registry import kernels_of
from flashgen.plan import KernelPlan
from flashgen.spec import AttentionSpec, Blocks
from flashgen.tuning.store import Measurement, TuneResult, best_for

#: The candidates of each kernel, by its key, for each of its targets.
Spaces = Mapping[str, Mapping[str, Space]]

_Best = tuple[TuneResult, Measurement]


def search_spaces(
    plan: KernelPlan, targets: Collection[str] = (), *, gradients: bool = True
) -> Spaces:
    """The configurations to choose from.

    Args:
        plan: what the kernels compute.
        targets: the targets; none means the plan's own.
        gradients: whether kernels of the backward pass are included.
    """
    return {
        key: {
            target: kernel.space(plan, target)
            for target in targets or plan.targets
            if kernel.runs_on(target)
        }
        for key, kernel in kernels_of(plan).items()
        if gradients or not kernel.gradients
    }


def digests(plan: KernelPlan, spaces: Spaces) -> dict[str, str]:
    """The digest of each kernel of the module, in the order of measuring.

    Digests are the keys of measurements.
    """
    return {
        key: kernel.digest(plan)
        for key, kernel in kernels_of(plan).items()
        if key in spaces
        if kernel.fallback or any(space.candidates for space in spaces[key].values())
    }


def pins(spec: AttentionSpec, kernel: Kernel) -> Blocks:
    """The blocks that a spec pins for a kernel: pins are for the dense forward kernels."""
    return Blocks() if kernel.gradients or kernel.form != "dense" else spec.blocks


def choices(
    plan: KernelPlan, digests: Mapping[str, str], spaces: Spaces, results: Iterable[TuneResult]
) -> dict[str, KernelChoice]:
    """The configurations to ship: the best measured, or the model's first if none was measured.

    Args:
        plan: what the kernels compute.
        digests: the digests of their sources; none if nothing was measured.
        spaces: their candidates.
        results: the measured results, from any machine.
    """
    results, kernels = tuple(results), kernels_of(plan)

    def best(key: str, target: str) -> _Best | None:
        return best_for(results, target, digests.get(key, ""), pins(plan.spec, kernels[key]))

    found = {}
    for key, of_kernel in spaces.items():
        kernel, configs, why_not = kernels[key], {}, ""
        fits = any(space.candidates for space in of_kernel.values())
        replaces = kernel.replaces(plan) if fits else ()
        for target, space in of_kernel.items():
            together = (key, *kernel.beside)
            if not all(spaces[other][target].candidates for other in together):
                why_not = why_not or space.why_not
                continue
            measured = best(key, target)
            others = [best(other, target) for other in replaces]
            if slower := _slower(measured, others, [kernels[other].title for other in replaces]):
                why_not = slower
                continue
            config = measured[1].config if measured else ranked(plan, key, target, spaces)[0]
            shared = kernel.usage(plan, config, get_target(target)).total
            configs[target] = _chosen(config, shared, measured)
        found[key] = KernelChoice(configs, why_not, replaces if configs else ())
    return found


def ranked(plan: KernelPlan, key: str, target: str, spaces: Spaces) -> tuple[KernelConfig, ...]:
    """One kernel's candidates on a target, most promising first."""
    candidates = spaces[key][target].candidates
    return tuple(kernels_of(plan)[key].rank(plan, target, candidates))


def _slower(one: _Best | None, others: list[_Best | None], titles: list[str]) -> str:
    """Why a kernel does not ship: the kernels that it replaces were faster on one GPU; else ``""``.

    Args:
        one: the kernel's measurements.
        others: the measurements of each kernel that it replaces.
        titles: the names of these kernels.
    """
    if one is None or not others:
        return ""
    measured = [other for other in others if other and _compares(one[0], other[0])]
    if len(measured) < len(others):
        return ""
    ms, other_ms = one[1].ms[-1], sum(other[1].ms[-1] for other in measured)
    if ms <= other_ms:
        return ""
    return f"on {one[0].gpu} it took {ms:.3g} ms, the {' and the '.join(titles)} {other_ms:.3g}"


def _compares(one: TuneResult, other: TuneResult) -> bool:
    """Whether two results have the same GPU, Triton and length."""
    return one.key[:2] == other.key[:2] and one.lengths == other.lengths


def _chosen(config: KernelConfig, shared: int, best: _Best | None) -> ChosenConfig:
    """The chosen configuration with its measurement; None if it is the model's choice."""
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
