"""The kernels that a module holds for one target, chosen as a build chooses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.codegen.render import kernel_digest
from flashgen.config import HOPPER, ChosenConfig, Form, HopperChoice
from flashgen.errors import ValidationError
from flashgen.explain.account import Buffer, Kernel, Rejection
from flashgen.kernels.base import Space
from flashgen.kernels.forward_hopper.shared_memory import hopper_usage
from flashgen.kernels.forward_hopper.space import hopper_space, predict_hopper
from flashgen.kernels.forward_triton.rank import predict
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.loader import Variant
from flashgen.plan import KernelPlan
from flashgen.symbolic.printer import plain_source
from flashgen.tuning.choose import choose, choose_hopper
from flashgen.tuning.store import TuneResult
from flashgen.validate import unfit

#: What a kernel can wait for, by the names of the model's.
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
        forms: the configuration of each, that of the kernel that runs first in front.
        spaces: what each was chosen from.
        digests: of their sources, by which measurements go; none where nothing was measured.
        without: why there is no Gluon kernel where the target could run one; ``""`` otherwise.
    """

    forms: Mapping[Form, ChosenConfig]
    spaces: Mapping[Form, Space]
    digests: Mapping[Form, str]
    without: str


def chosen_kernels(
    variant: Variant, plan: KernelPlan, target: str, results: Iterable[TuneResult]
) -> Chosen:
    """The best measured configurations, or the model's first where there is none.

    Raises:
        ValidationError: no configuration fits the target.
    """
    results = tuple(results)
    space = search_space(plan, target)
    if not space.candidates:
        raise ValidationError([unfit(variant, plan, target, space.rejected)])
    gluon = hopper_space(plan) if target == HOPPER else None
    digests: dict[Form, str] = {}
    if results:  # a kernel is rendered for it
        has_gluon = gluon is not None and gluon.candidates
        forms: tuple[Form, ...] = ("hopper", "portable") if has_gluon else ("portable",)
        digests = {form: kernel_digest(plan, form) for form in forms}
    portable = digests.get("portable", "")
    hopper = HopperChoice()
    if gluon is not None:
        hopper = choose_hopper(plan, digests.get("hopper", ""), portable, gluon, results)
    chosen = choose(plan, portable, {target: space}, results)
    forms_chosen: dict[Form, ChosenConfig] = {}
    spaces: dict[Form, Space] = {}
    if hopper.config and gluon is not None:
        forms_chosen["hopper"], spaces["hopper"] = hopper.config, gluon
    forms_chosen["portable"], spaces["portable"] = chosen[target], space
    return Chosen(forms_chosen, spaces, digests, hopper.why_not)


def kernel_accounts(
    plan: KernelPlan, target: str, chosen: Chosen, work: Workload
) -> tuple[Kernel, ...]:
    """Shared memory and modelled time of each, and what was not chosen."""
    return tuple(
        _account(plan, get_target(target), form, choice, chosen.spaces[form], work)
        for form, choice in chosen.forms.items()
    )


def _account(
    plan: KernelPlan,
    target: Target,
    form: Form,
    choice: ChosenConfig,
    space: Space,
    work: Workload,
) -> Kernel:
    config = choice.config
    usage = hopper_usage(plan, config) if form == "hopper" else sram_usage(plan, config, target)
    seconds, waits_for = _modelled(plan, target, form, choice, work)
    return Kernel(
        form=form,
        config=config,
        chosen=_grounds(choice),
        shared=usage.total,
        limit=usage.limit,
        phase=usage.phase,
        buffers=_buffers(usage),
        candidates=len(space.candidates),
        rejected=tuple(Rejection(*pair) for pair in space.rejected),
        seconds=seconds,
        waits_for=waits_for,
    )


def _modelled(
    plan: KernelPlan, target: Target, form: Form, choice: ChosenConfig, work: Workload
) -> tuple[float | None, str]:
    """Seconds and what is waited for, by the models that rank candidates."""
    if plan.listing:  # they go by the bounds alone
        return None, ""
    if form == "hopper":
        return predict_hopper(plan, choice.config, work), ""
    prediction = predict(plan, choice.config, target, work)
    return prediction.seconds, WAITS[prediction.bound]


def _grounds(choice: ChosenConfig) -> str:
    """On what grounds a configuration ships."""
    if choice.source == "model":
        return "by model"
    return f"measured on {choice.gpu} with Triton {choice.triton}: {choice.tflops:.0f} TFLOP/s"


def _buffers(usage: SramUsage) -> tuple[Buffer, ...]:
    formulas = dict(usage.formulas)
    return tuple(
        Buffer(name, usage.meanings[name], plain_source(formulas[name]), size)
        for name, size in usage.parts
    )
