"""The portable backward kernels: one goes over tiles of keys, the other over tiles of queries."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.config import BACKWARD_KERNELS, BackwardKernel, KernelChoice, KernelConfig
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.shared_memory import backward_usage, worst_backward_usage
from flashgen.kernels.backward_triton.space import backward_space
from flashgen.kernels.base import GradientKernel, Space, Timing, ViewOf
from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.plan import KernelPlan
from flashgen.plan.backward import BackwardPlan, backward_plan

#: The kernels' keys.
KEYS: Mapping[BackwardKernel, str] = {"keys": "backward_keys", "queries": "backward_queries"}

#: Their functions.
FUNCTIONS: Mapping[BackwardKernel, str] = {
    "keys": "_backward_of_keys",
    "queries": "_backward_of_queries",
}


def render_backward(backward: BackwardPlan) -> str:
    """The Triton functions of the backward pass, which call those of the forward kernel."""
    return render(
        "backward_triton/kernel.py.jinja", plan=backward.plan, backward=backward, varlen=False
    )


def _source(plan: KernelPlan) -> str:
    """The functions of both kernels, each of which asks for them, as do both digests."""
    if _source not in plan.derived:
        plan.derived[_source] = render_backward(backward_plan(plan))
    kept: str = plan.derived[_source]
    return kept


class _BackwardTriton(GradientKernel):
    """Shared parts of both kernels.

    Attributes:
        of: the tensors whose gradients a program computes.
    """

    name = "backward_triton"
    fallback = True
    of: ClassVar[BackwardKernel]
    products: ClassVar[tuple[int, int]]

    def space(self, plan: KernelPlan, target: str) -> Space:
        """The tile sizes that suit the kernel."""
        return backward_space(plan, self.of, target)

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By the products that an SM has in flight."""
        return rank_backward(plan, self.of, target, candidates)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """With the target's own way of copying tiles."""
        return backward_usage(plan, self.of, config, target)

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The larger of both ways of copying tiles."""
        return worst_backward_usage(plan, self.of, config, target)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions of both kernels and of the kernel over rows, which share functions."""
        return _source(plan)

    def digest(self, plan: KernelPlan) -> str:
        """Over the functions that it calls, the forward kernel's among them."""
        text = render_kernel(plan) + "\n\n" + _source(plan)
        return source_digest(text, (FUNCTIONS[self.of],))

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """Its configurations."""
        return {f"chosen_of_{self.of}": choice.configs}

    def why_not_packed(self, plan: KernelPlan) -> str:
        """Nothing: it serves every plan."""
        return ""

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """The functions of both kernels and of that over rows, which call the dense kernels'."""
        backward = backward_plan(plan, packed=True)
        added = sorted({len(item.indices) for item in backward.input_gradients})
        given: dict[str, Any] = {"plan": plan, "backward": backward, "varlen": True}
        return render("backward_triton/varlen.py.jinja", added=added, view_of=view_of, **given)

    def timing(self, plan: KernelPlan) -> Timing:
        """Timed alone: the other kernel is disabled."""
        return Timing(
            launcher="_backward_kernels",
            configurations=2,
            functions=(FUNCTIONS[self.of],),
            others=tuple(FUNCTIONS[other] for other in BACKWARD_KERNELS if other != self.of),
            makes=(self.of,),
            products=self.products,
        )


class BackwardTritonKeys(_BackwardTriton):
    """Gradients of keys and values: weights are transposed, as a product's left operand."""

    key = KEYS["keys"]
    seal = "keys"
    title = "backward kernel over keys"
    beside = (KEYS["queries"],)
    of = "keys"
    products = (2, 2)  # of scores and their gradients, then of v and k


class BackwardTritonQueries(_BackwardTriton):
    """Gradients of queries, and most input gradients."""

    key = KEYS["queries"]
    seal = "queries"
    title = "backward kernel over queries"
    beside = (KEYS["keys"],)
    of = "queries"
    products = (2, 1)  # of scores and their gradients, then of q
