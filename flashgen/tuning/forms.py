"""forms: a variant's kernels, the portable ones and Gluon's for Hopper, as a build treats them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashgen.codegen.render import kernel_digest
from flashgen.config import (
    BACKWARD_FORMS,
    BACKWARD_KERNELS,
    GRADIENT_FORMS,
    HOPPER,
    BackwardConfigs,
    BackwardKernel,
    ChosenConfig,
    Form,
    HopperChoice,
)
from flashgen.kernels.backward_hopper.space import rank_hopper_backward
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.space import backward_space
from flashgen.kernels.base import Space
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.tuning.choose import choose, choose_backward, choose_hopper, choose_hopper_backward
from flashgen.tuning.store import TuneResult


@dataclass(frozen=True)
class Spaces:
    """What to choose from.

    Attributes:
        portable: for each target, the configurations of the portable kernel.
        hopper: those of the Gluon kernel; None where Hopper is no target.
        backward: for each target, those of each backward kernel, perhaps none.
        hopper_backward: those of the Gluon kernel of the backward pass; None likewise.
    """

    portable: Mapping[str, Space] = field(default_factory=dict)
    hopper: Space | None = None
    backward: Mapping[str, Mapping[BackwardKernel, Space]] = field(default_factory=dict)
    hopper_backward: Space | None = None


@dataclass(frozen=True)
class Choices:
    """What was chosen.

    Attributes:
        portable: the portable kernel's configuration for each target.
        hopper: whether the module holds the Gluon kernel, with its configuration.
        backward: the backward kernels' configurations for each target that has tiles for both.
        hopper_backward: whether the module holds the Gluon kernel of the backward pass.
    """

    portable: Mapping[str, ChosenConfig] = field(default_factory=dict)
    hopper: HopperChoice = field(default_factory=HopperChoice)
    backward: Mapping[str, BackwardConfigs] = field(default_factory=dict)
    hopper_backward: HopperChoice = field(default_factory=HopperChoice)


def search_spaces(plan: KernelPlan) -> Spaces:
    """The configurations to choose from, for each target and kernel of a plan."""
    hopper = hopper_backward = None
    if HOPPER in plan.targets:
        hopper = hopper_space(plan)
        hopper_backward = split_space(HopperBackwardSplit(backward_plan(plan)))
    backward = {
        target: {kernel: backward_space(plan, kernel, target) for kernel in BACKWARD_KERNELS}
        for target in plan.targets
    }
    portable = {target: search_space(plan, target) for target in plan.targets}
    return Spaces(portable, hopper, backward, hopper_backward)


def digests(plan: KernelPlan, spaces: Spaces) -> dict[Form, str]:
    """The digest of each kernel that the module holds, in the order that they are measured in.

    Measurements go by them. Forward kernels come first, and of either pass the Gluon kernel, where
    there is one.
    """
    forms: tuple[Form, ...] = ("hopper", "portable", *GRADIENT_FORMS)
    gluon = {"hopper": spaces.hopper, "hopper_backward": spaces.hopper_backward}
    without = {form for form, space in gluon.items() if not (space and space.candidates)}
    return {form: kernel_digest(plan, form) for form in forms if form not in without}


def choices(
    plan: KernelPlan, kernels: Mapping[Form, str], spaces: Spaces, results: Iterable[TuneResult]
) -> Choices:
    """The configurations to ship: the best measured, or the model's first where none was.

    Args:
        plan: what the kernels compute.
        kernels: their `digests`.
        spaces: their candidates; of the portable kernel some for each target.
        results: what was measured, on any machine.
    """
    results = tuple(results)
    return Choices(
        choose(plan, kernels["portable"], spaces.portable, results),
        choose_hopper(plan, kernels.get("hopper", ""), kernels["portable"], spaces.hopper, results),
        choose_backward(plan, kernels, spaces.backward, results),
        choose_hopper_backward(plan, kernels, spaces.hopper_backward, results),
    )


def ranked(plan: KernelPlan, form: Form, target: str, spaces: Spaces) -> Space:
    """One kernel's candidates on a target, most promising first, and those turned down."""
    if form == "hopper":
        assert spaces.hopper is not None
        order = rank_hopper(plan, spaces.hopper.candidates)
        return Space(tuple(order), spaces.hopper.rejected)
    if form == "hopper_backward":
        assert spaces.hopper_backward is not None
        order = rank_hopper_backward(spaces.hopper_backward.candidates)
        return Space(tuple(order), spaces.hopper_backward.rejected)
    for kernel, of_backward in BACKWARD_FORMS.items():
        if form == of_backward:
            space = spaces.backward[target][kernel]
            order = rank_backward(plan, kernel, target, space.candidates)
            return Space(tuple(order), space.rejected)
    space = spaces.portable[target]
    return Space(tuple(c for c, _ in rank(plan, target, space.candidates)), space.rejected)
