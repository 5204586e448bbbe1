"""ForwardTriton: the portable forward kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flashgen.budget.targets import Target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.config import KernelChoice, KernelConfig
from flashgen.kernels.base import ForwardKernel, Space, ViewOf
from flashgen.kernels.forward_triton.rank import predict, rank
from flashgen.kernels.forward_triton.shared_memory import sram_usage, worst_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import KernelPlan


def render_kernel(plan: KernelPlan) -> str:
    """The Triton functions of the forward kernel, `_attention_forward` last.

    Digests of the backward kernels ask for them too.
    """
    if render_kernel not in plan.derived:
        given: dict[str, Any] = {"plan": plan, "varlen": False}
        plan.derived[render_kernel] = render("forward_triton/kernel.py.jinja", **given)
    kept: str = plan.derived[render_kernel]
    return kept


class ForwardTriton(ForwardKernel):
    """The kernel in FlashAttention-2's order, for every target and plan."""

    name = "forward_triton"
    key = "portable"
    seal = "kernel"
    title = "portable kernel"
    fallback = True
    launcher = "_launch"
    own = "this kernel"

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Tiles, warps and stages that fit, except those that a rule rejects."""
        return search_space(plan, target)

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By their modelled time."""
        return [config for config, _ in rank(plan, target, candidates)]

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """With the target's own way of copying tiles."""
        return sram_usage(plan, config, target)

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The larger of both ways of copying tiles."""
        return worst_usage(plan, config, target)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions that other kernels in Triton call too, then its own."""
        return render_kernel(plan)

    def digest(self, plan: KernelPlan) -> str:
        """Over the whole source."""
        return source_digest(render_kernel(plan))

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """Its configurations."""
        return {"chosen": choice.configs}

    def why_not_packed(self, plan: KernelPlan) -> str:
        """Nothing: it serves every plan."""
        return ""

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """`_varlen_forward`, which calls the dense kernel's functions."""
        template = "forward_triton/varlen.py.jinja"
        return render(template, plan=plan, varlen=True, view_of=view_of)

    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        """From its instructions and bytes."""
        prediction = predict(plan, config, target, work)
        return prediction.seconds, prediction.bound
