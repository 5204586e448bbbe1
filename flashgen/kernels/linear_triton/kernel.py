"""LinearForward and LinearGradients: the kernels of linear attention, in Triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.codegen.folding import folded
from flashgen.config import KernelChoice, KernelConfig
from flashgen.kernels.base import ForwardKernel, GradientKernel, Space, Timing, ViewOf
from flashgen.kernels.linear_triton.occupancy import programs_of
from flashgen.kernels.linear_triton.shared_memory import linear_usage, width_of_features
from flashgen.kernels.linear_triton.space import linear_space, rank_linear
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan

# In the order of their launches; a module has those of them that its plan needs.
GRADIENT_FUNCTIONS = (
    "_weighted_features",
    "_linear_features",
    "_linear_states",
    "_linear_backward_of_queries",
    "_linear_states_of_queries",
    "_linear_backward_of_keys",
    "_linear_backward_of_values",
    "_linear_pairs_of_queries",
    "_linear_pairs_of_keys",
    "_linear_pairs_of_values",
    "_linear_first_of_pairs",
    "_linear_pairs_of_decays",
)


def render_linear(plan: KernelPlan, *, packed: bool = False) -> str:
    """The functions of the forward pass, `_linear_forward` last; packed: of packed sequences."""
    return _rendered("linear_triton/kernel.py.jinja", plan, packed)


def render_linear_gradients(plan: KernelPlan, *, packed: bool = False) -> str:
    """The functions of the backward pass, which call those of the forward pass."""
    return _rendered("linear_triton/backward.py.jinja", plan, packed)


def _rendered(template: str, plan: KernelPlan, packed: bool) -> str:
    return folded(render(template, plan=plan, linear=LinearPlan(plan, packed=packed)))


class LinearForward(ForwardKernel):
    """States of segments, then the output: for every plan of linear attention."""

    name = "linear_triton"
    key = "linear"
    seal = "linear"
    title = "linear kernel"
    linear = True
    fallback = True
    launcher = "_launch"
    own = "this kernel"

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Chunks, warps and stages that fit."""
        return linear_space(plan, target, gradients=False)

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By what hides latency."""
        return rank_linear(plan, target, candidates, gradients=False)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The larger one of its functions."""
        return linear_usage(plan, config, target, gradients=False)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions of the forward pass."""
        return render_linear(plan)

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """The same of packed sequences."""
        return render_linear(plan, packed=True)

    def digest(self, plan: KernelPlan) -> str:
        """Over the whole source."""
        return source_digest(render_linear(plan))

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """Its configurations."""
        linear = LinearPlan(plan)
        names: dict[str, Any] = {
            "chosen": choice.configs,
            "programs": programs_of(choice),
            "linear": linear,
        }
        if linear.random:
            targets = choice.configs
            names["widths_of_features"] = {
                target: width_of_features(plan, get_target(target)) for target in targets
            }
        return names

    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        """Not modelled: `flashgen explain` refuses linear attention."""
        raise NotImplementedError("linear attention has no model of its time")


class LinearGradients(GradientKernel):
    """The gradients of queries in the forward pass's order, those of keys and values in reverse."""

    name = "linear_triton"
    key = "linear_gradients"
    seal = "linear_gradients"
    title = "linear kernels of gradients"
    linear = True
    fallback = True

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Chunks, warps and stages that fit."""
        return linear_space(plan, target, gradients=True)

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By what hides latency."""
        return rank_linear(plan, target, candidates, gradients=True)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The largest one of its functions."""
        return linear_usage(plan, config, target, gradients=True)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions of the backward pass; those of the forward pass precede them."""
        return render_linear_gradients(plan)

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """The same of packed sequences."""
        return render_linear_gradients(plan, packed=True)

    def digest(self, plan: KernelPlan) -> str:
        """Over the functions that it calls, the forward kernel's among them."""
        text = render_linear(plan) + "\n\n" + render_linear_gradients(plan)
        return source_digest(text, GRADIENT_FUNCTIONS)

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """Its configurations."""
        return {
            "chosen_of_gradients": choice.configs,
            "programs_of_gradients": programs_of(choice),
        }

    def timing(self, plan: KernelPlan) -> Timing:
        """Timed as a whole pass: its functions share a configuration."""
        return Timing(
            launcher="_launch_gradients",
            configurations=1,
            functions=GRADIENT_FUNCTIONS,
            others=(),
            makes=("keys", "queries"),
            products=(3, 2),
        )
