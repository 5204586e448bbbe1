"""BackwardHopper: the Gluon kernel that computes all gradients in one pass, on Hopper."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flashgen.budget.targets import Target, get_target
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.codegen.folding import folded
from flashgen.config import HOPPER, KernelChoice, KernelConfig
from flashgen.kernels.backward_hopper.plan import DIALECT, HopperBackward
from flashgen.kernels.backward_hopper.shared_memory import (
    hopper_backward_usage,
    worst_hopper_backward_usage,
)
from flashgen.kernels.backward_hopper.space import hopper_backward_space, rank_hopper_backward
from flashgen.kernels.backward_triton.kernel import FUNCTIONS, KEYS, BackwardTritonKeys
from flashgen.kernels.base import GradientKernel, Needs, Space, Timing, ViewOf
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.views import views_in_gluon
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.plan.mask_code import MaskCode


def render_over_keys(
    names: HopperBackward, template: str, *, after_forward: bool, gathers: Collection[int]
) -> str:
    """The functions of a kernel over tiles of keys, of one pass or of a split one.

    Args:
        names: the kernel.
        template: the kernel's template.
        after_forward: whether the functions of the Gluon forward kernel, some of which are shared,
            precede these.
        gathers: dimension counts of the tensors that these functions and later ones read.
    """
    plan = names.backward.plan
    before = HopperNames(plan).promised_mask_code if after_forward else MaskCode(())
    needed = sorted(set(gathers).difference(plan.gathers if after_forward else ()))
    text = render(
        template,
        DIALECT,
        plan=plan,
        backward=names.backward,
        names=names,
        after_forward=after_forward,
        before=before,
        gathers=needed,
    )
    return folded(text)


class BackwardHopper(GradientKernel):
    """Five products; TMA accumulates the gradients of queries over tiles of keys."""

    name = "backward_hopper"
    key = "hopper_backward"
    seal = "grads"
    title = "Gluon kernel of the backward pass"
    elsewhere = "where TMA cannot read q, k, v or the output's gradient"

    def names_of(self, plan: KernelPlan) -> HopperBackward:
        """The variables of its template besides the plan."""
        return HopperBackward(backward_plan(plan))

    def runs_on(self, target: str) -> bool:
        """On Hopper alone."""
        return target == HOPPER

    def why_not(self, plan: KernelPlan) -> str:
        """Unsupported elements, columns, sums or scores, or a split pass."""
        names = self.names_of(plan)
        return names.why_not or ("two kernels split the pass" if names.split else "")

    def replaces(self, plan: KernelPlan) -> tuple[str, ...]:
        """The portable kernels that the Gluon kernels replace."""
        return tuple(KEYS[kernel] for kernel in self.names_of(plan).replaces)

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Tile sizes, which registers fix, and stages."""
        if reason := self.why_not(plan):
            return Space((), (), reason)
        space = self.space_of(plan)
        if space.candidates:
            return space
        config, reason = space.rejected[0]
        return replace(space, why_not=f"{config}: {reason}")

    def space_of(self, plan: KernelPlan) -> Space:
        """The configurations of a plan that it serves."""
        return hopper_backward_space(self.names_of(plan))

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """The fewest stages first."""
        return rank_hopper_backward(candidates)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """For parameters that are contiguous, as usual."""
        return hopper_backward_usage(self.names_of(plan), config)

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """For any strides and any version of Triton."""
        return worst_hopper_backward_usage(self.names_of(plan), config)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """`_backward_hopper`, then `_place_sums`."""
        names = self.names_of(plan)
        return render_over_keys(
            names,
            "backward_hopper/kernel.py.jinja",
            after_forward=ForwardHopper.key in before,
            gathers=names.gathers,
        )

    def digest(self, plan: KernelPlan) -> str:
        """Over the functions that its launches call."""
        return source_digest(self.source(plan), self.functions)

    #: What it can consist of, in the order of the launches.
    functions: ClassVar[tuple[str, ...]] = ("_backward_hopper", "_place_sums")

    def needs(self, plan: KernelPlan) -> Needs:
        """For a single pass: parts for persistent programs, and sums by TMA."""
        names = self.names_of(plan)
        return Needs(
            gluon=True,
            sms=not names.split,
            counter=not names.split,
            l2=names.orders_heads,
            tma_adds=not names.split,
            reinterprets=not names.split,
        )

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """The variables that the launchers of this kernel and of the portable kernels read."""
        names = self.names_of(plan)
        return {
            "hopper_backward": choice,
            "hopper_backward_names": names,
            "hopper_limit": get_target(HOPPER).max_shared,
            "queries_shared": 0,
            "shares_queries": bool(choice.configs) and names.queries_portable,
        }

    def why_not_packed(self, plan: KernelPlan) -> str:
        """Learned tensors, two kernels, or several runs of queries without lists."""
        names = HopperBackward(backward_plan(plan), of_sequences=True)
        if names.split or names.text.input_gradients:
            return "the pass is split" if names.split else "it sums no gradients of learned tensors"
        separate = names.visits.splits or names.visits.tiles.separated
        return "" if separate else "it visits one run of queries"

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """The kernel, then functions in Triton for rows, sums and keys without queries."""
        backward = backward_plan(plan)
        views = views_in_gluon(backward.both_arguments, view_of)
        names = HopperBackward(backward, of_sequences=True, views=views)
        template = "backward_hopper/kernel.py.jinja"
        return render_over_keys(names, template, after_forward=False, gathers=names.gathers)

    def timing(self, plan: KernelPlan) -> Timing:
        """Timed with `_place_sums`, or with the Gluon kernel over tiles of queries."""
        names = self.names_of(plan)
        over_keys = names.replaces == ("keys",)
        return Timing(
            launcher="_backward_kernels_hopper",
            configurations=2 if names.queries_portable else 1,
            functions=self.functions,
            others=tuple(FUNCTIONS.values()),
            makes=names.replaces,
            products=BackwardTritonKeys.products if over_keys else (3, 2),
        )
