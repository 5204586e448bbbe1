"""BackwardHopperSplit: the backward pass on Hopper, split between two kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flashgen.codegen.environment import render
from flashgen.codegen.folding import folded
from flashgen.config import KernelChoice
from flashgen.kernels.backward_hopper.kernel import BackwardHopper, render_over_keys
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.queries import DIALECT
from flashgen.kernels.backward_hopper_split.shared_memory import queries_usage
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.base import Space
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan


class BackwardHopperSplit(BackwardHopper):
    """A Gluon kernel over tiles of keys, and a Gluon or portable kernel over tiles of queries."""

    name = "backward_hopper_split"
    functions = ("_backward_hopper", "_backward_queries_hopper", "_sum_strips")

    @property
    def launchers(self) -> str:
        """The templates of the single pass launch both kernels."""
        return BackwardHopper.name

    def names_of(self, plan: KernelPlan) -> HopperBackwardSplit:
        """The variables of its templates besides the plan."""
        return HopperBackwardSplit(backward_plan(plan))

    def why_not(self, plan: KernelPlan) -> str:
        """Unsupported elements, columns, sums or scores, or a single pass."""
        names = self.names_of(plan)
        return names.why_not or ("" if names.split else "one kernel computes all gradients")

    def space_of(self, plan: KernelPlan) -> Space:
        """The configurations of a plan that it serves."""
        return split_space(self.names_of(plan))

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """`_backward_hopper`, then the kernel over queries, unless the portable one runs."""
        names = self.names_of(plan)
        both = names.both_in_gluon
        used = {*names.gathers, *(names.of_queries.gathers if both else ())}
        template = "backward_hopper_split/keys.py.jinja"
        after_forward = ForwardHopper.key in before
        over_keys = render_over_keys(names, template, after_forward=after_forward, gathers=used)
        if not both:
            return over_keys
        over_queries = render(
            "backward_hopper_split/queries.py.jinja",
            DIALECT,
            plan=plan,
            backward=names.backward,
            names=names,
            queries=names.of_queries,
        )
        return f"{over_keys}\n\n{folded(over_queries)}"

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """With the shared memory of the kernel over queries, if there is one in Gluon."""
        names = self.names_of(plan)
        shared = queries_usage(names).total if choice.configs and names.both_in_gluon else 0
        return {**super().names(plan, choice), "queries_shared": shared}
