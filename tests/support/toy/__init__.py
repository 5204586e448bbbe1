"""A toy kernel, as somebody would add one: for calls of a single query, without a mask.

One program has one row of queries and goes over its keys. It is here to show that a kernel needs no
edited line in flashgen; nobody should compute with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashgen.budget.buffers import Phase
from flashgen.budget.quantities import BLOCK_N, ITEMSIZE, widths
from flashgen.budget.targets import Target, get_target
from flashgen.budget.traffic import Workload, traffic
from flashgen.budget.usage import SramUsage, usage_of
from flashgen.codegen.digest import source_digest
from flashgen.codegen.environment import environment
from flashgen.config import KernelChoice, KernelConfig
from flashgen.kernels.base import ForwardKernel, Space
from flashgen.plan import KernelPlan

_TEMPLATES = Path(__file__).parent / "templates"


class Toy(ForwardKernel):
    """A row of queries a program."""

    name = "toy"
    key = "toy"
    seal = "toy"
    title = "toy kernel"
    elsewhere = "where there are several queries"
    launcher = "_launch_toy"
    own = "this toy kernel"

    @property
    def templates(self) -> Path:
        return _TEMPLATES

    def why_not(self, plan: KernelPlan) -> str:
        if plan.masks or plan.spec.score is not None or plan.params or plan.sink_torch:
            return "it computes nothing but plain attention"
        if len(plan.qk_segments) > 1 or plan.qk_segments != plan.v_segments:
            return "its rows are of one power of two"
        return ""

    def replaces(self, plan: KernelPlan) -> tuple[str, ...]:
        return ("portable",)

    def space(self, plan: KernelPlan, target: str) -> Space:
        if reason := self.why_not(plan):
            return Space((), (), reason)
        configs = [KernelConfig(1, keys, 4, 1) for keys in (16, 32, 4096)]
        shortages = {
            config: self.usage(plan, config, get_target(target)).shortage(target)
            for config in configs
        }
        return Space(
            tuple(config for config, shortage in shortages.items() if not shortage),
            tuple((config, shortage) for config, shortage in shortages.items() if shortage),
        )

    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> list[KernelConfig]:
        return sorted(candidates, key=lambda config: -config.BLOCK_N)

    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        (qk,) = widths("qk", 1)
        return usage_of(
            (Phase("loop", (("K or V", BLOCK_N * qk * ITEMSIZE),)),), plan, config, target
        )

    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        template = environment(folders=(_TEMPLATES,)).get_template("toy/kernel.py.jinja")
        return template.render(plan=plan).strip("\n") + "\n"

    def digest(self, plan: KernelPlan) -> str:
        return source_digest(self.source(plan))

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        return {"toys": choice.configs}

    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        return traffic(plan, config, target, work).dram_bytes / (target.dram_gbps * 1e9), "dram"
