"""CacheTriton: the kernel for a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flashgen.budget.targets import Target, get_target
from flashgen.budget.usage import SramUsage
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import render
from flashgen.config import KernelChoice, KernelConfig
from flashgen.kernels.base import Kernel, Space
from flashgen.kernels.cache_triton.plan import VECTORS, CachePlan
from flashgen.kernels.cache_triton.rank import rank_cache
from flashgen.kernels.cache_triton.shared_memory import cache_usage, programs_of_an_sm
from flashgen.kernels.cache_triton.space import cache_space, for_many_rows
from flashgen.plan import KernelPlan


def render_cache(plan: KernelPlan, *, alone: bool = True) -> str:
    """The Triton functions of the cache kernel, then those of the kernel that appends.

    Args:
        plan: what it computes.
        alone: with the functions that it shares with the portable forward kernel.
    """
    cache = CachePlan(plan)
    kernel = render("cache_triton/kernel.py.jinja", VECTORS, plan=plan, cache=cache, alone=alone)
    return f"{kernel}\n\n{render('cache_triton/append.py.jinja', plan=plan)}"


class CacheTriton(Kernel):
    """Split keys, in pages or in rows of one tensor, for every target and plan with the form."""

    name = "cache_triton"
    key = "cached"
    seal = "cache"
    title = "cache kernel"
    gradients = False
    fallback = True
    form = "cache"
    timed = False

    def space(self, plan: KernelPlan, target: str) -> Space:
        """Tiles of keys and stages that fit."""
        return cache_space(plan, target)

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        """By the bytes that they have on their way."""
        return rank_cache(plan, target, candidates)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """For a cache without pages."""
        return cache_usage(plan, config, target)

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """With pages."""
        return cache_usage(plan, config, target, paged=True)

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The kernel's functions; the portable forward kernel's precede them in a module."""
        return render_cache(plan, alone="portable" not in before)

    def digest(self, plan: KernelPlan) -> str:
        """Over the kernel that computes attention."""
        return source_digest(render_cache(plan), ("_cache_attention",))

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """Its configurations for tiles of few rows and of many, each with the programs of an SM."""
        configs: dict[str, dict[int, dict[str, int]]] = {}
        for target, chosen in choice.configs.items():
            of_target = get_target(target)
            both = (chosen.config, for_many_rows(plan, chosen.config, of_target))
            configs[target] = {
                config.BLOCK_M: {
                    **config.as_dict(),
                    "programs": programs_of_an_sm(plan, config, of_target),
                }
                for config in both
            }
        return {"cache": CachePlan(plan), "cache_configs": configs}
