"""The kernels that a module holds for one target, chosen as a build chooses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.config import ChosenConfig
from flashgen.errors import ValidationError
from flashgen.explain.account import Buffer, Kernel, Rejection
from flashgen.kernels.base import ForwardKernel, Space
from flashgen.kernels.registry import kernels_of
from flashgen.loader import Variant
from flashgen.plan import KernelPlan
from flashgen.symbolic.printer import plain_source
from flashgen.tuning.choose import choices, digests, search_spaces
from flashgen.tuning.store import TuneResult
from flashgen.validate import unfit

#: What a kernel can wait for, by the model's names.
WAITS: Mapping[str, str] = {
    "matrix": "the matrix units",
    "exponentials": "exponentials",
    "arithmetic": "ordinary arithmetic",
    "shared": "shared memory",
    "l2": "L2",
    "dram": "DRAM",
    "turns": "products and softmax, which take turns",
}


@dataclass(frozen=True)
class Chosen:
    """The forward kernels of a module for one target.

    Attributes:
        kernels: the module's kernels by their keys; the kernel that runs first comes first.
        configs: the configuration of each.
        spaces: the candidates of each.
        digests: the digests of their sources, the keys of measurements; none if unmeasured.
        without: why a kernel that the target could run is missing; ``""`` if none is.
    """

    kernels: Mapping[str, ForwardKernel]
    configs: Mapping[str, ChosenConfig]
    spaces: Mapping[str, Space]
    digests: Mapping[str, str]
    without: str


def chosen_kernels(
    variant: Variant, plan: KernelPlan, target: str, results: Iterable[TuneResult]
) -> Chosen:
    """The best measured configurations, or the model's first if nothing was measured.

    Raises:
        ValidationError: no configuration fits the target.
    """
    results = tuple(results)
    kernels = {key: k for key, k in kernels_of(plan).items() if isinstance(k, ForwardKernel)}
    spaces = search_spaces(plan, (target,), gradients=False)
    spaces = {key: of_kernel for key, of_kernel in spaces.items() if key in kernels}
    for key, kernel in kernels.items():
        if kernel.fallback and not spaces[key][target].candidates:
            raise ValidationError(
                [unfit(variant, plan, kernel, target, spaces[key][target].rejected)]
            )
    of_sources = digests(plan, spaces) if results else {}  # kernels are rendered for them
    chosen = choices(plan, of_sources, spaces, results)
    configs = {key: of.configs[target] for key, of in chosen.items() if target in of.configs}
    return Chosen(
        {key: kernels[key] for key in configs},
        configs,
        {key: spaces[key][target] for key in configs},
        of_sources,
        next((of.why_not for of in chosen.values() if of.why_not), ""),
    )


def kernel_accounts(
    plan: KernelPlan, target: str, chosen: Chosen, work: Workload
) -> tuple[Kernel, ...]:
    """Shared memory and modelled time of each kernel, and its rejected configurations."""
    return tuple(_account(plan, get_target(target), key, chosen, work) for key in chosen.kernels)


def _account(plan: KernelPlan, target: Target, key: str, chosen: Chosen, work: Workload) -> Kernel:
    choice, space = chosen.configs[key], chosen.spaces[key]
    usage = chosen.kernels[key].usage(plan, choice.config, target)
    seconds, waits_for = None, ""
    if not plan.listing:  # models use the bounds alone
        seconds, unit = chosen.kernels[key].predict(plan, choice.config, target, work)
        waits_for = WAITS[unit] if unit else ""
    return Kernel(
        form=key,
        config=choice.config,
        chosen=grounds(choice),
        shared=usage.total,
        limit=usage.limit,
        phase=usage.phase,
        buffers=_buffers(usage),
        candidates=len(space.candidates),
        rejected=tuple(Rejection(*pair) for pair in space.rejected),
        seconds=seconds,
        waits_for=waits_for,
    )


def grounds(choice: ChosenConfig) -> str:
    """Why a configuration ships."""
    if choice.source == "model":
        return "by model"
    return f"measured on {choice.gpu} with Triton {choice.triton}: {choice.tflops:.0f} TFLOP/s"


def _buffers(usage: SramUsage) -> tuple[Buffer, ...]:
    formulas = dict(usage.formulas)
    return tuple(
        Buffer(name, usage.meanings[name], plain_source(formulas[name]), size)
        for name, size in usage.parts
    )
