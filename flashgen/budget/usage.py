"""SramUsage: the shared memory that a block of a kernel needs, in all and part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy

from flashgen.budget.buffers import MEANINGS, Phase, with_weights
from flashgen.budget.matrix_units import SMALLEST_SIDE
from flashgen.budget.quantities import widths
from flashgen.budget.targets import Target
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.symbols import evaluate


@dataclass(frozen=True)
class SramUsage:
    """Shared memory of one block, in bytes.

    Attributes:
        total: the bytes of the block.
        parts: the buffers of the largest phase, by name; they add up to `total`.
        phase: the largest phase: ``"loop"``, ``"read Q"``, ``"output"``...
        limit: the target's limit for one block.
        formula: `total` over BLOCK_M, BLOCK_N, num_warps, num_stages, itemsize and the widths of
            the head dimensions' segments, ``qk_0``, ``v_0``...
        formulas: for each part its bytes over the same symbols, without bytes skipped before it.
    """

    total: int
    parts: tuple[tuple[str, int], ...]
    phase: str
    limit: int
    formula: Any
    formulas: tuple[tuple[str, Any], ...]

    @property
    def fits(self) -> bool:
        """Whether the block fits the target's limit."""
        return self.total <= self.limit

    def shortage(self, target: str) -> str:
        """Why a block is too large for a target of this name; ``""`` where it fits."""
        if self.fits:
            return ""
        has = f"{target} has {self.limit:,} B"
        return f"needs {self.total:,} B of shared memory, {has} ({self.breakdown})"

    @property
    def breakdown(self) -> str:
        """The parts on one line: ``Q 32,768 + K 65,536 + V 65,536``."""
        return " + ".join(f"{name} {size:,}" for name, size in self.parts)

    @property
    def meanings(self) -> Mapping[str, str]:
        """What each part is, in plain words."""
        return {name: MEANINGS[name] for name, _ in self.parts}


def usage_of(
    phases: tuple[Phase, ...], plan: KernelPlan, config: KernelConfig, target: Target
) -> SramUsage:
    """The usage of a block with these phases, for a configuration and a plan's widths."""
    if not plan.code.of_products:
        phases = with_weights(phases)
    return usage_of_phases(phases, values_of(plan, config), target)


def usage_of_phases(
    phases: tuple[Phase, ...], values: Mapping[str, int], target: Target
) -> SramUsage:
    """The usage of a block with these phases, for the number behind every symbol."""
    sizes = {
        phase: [(name, evaluate(size, values)) for name, size in phase.parts] for phase in phases
    }
    largest = max(sizes, key=lambda phase: sum(size for _, size in sizes[phase]))
    parts = tuple((name, size) for name, size in sizes[largest] if size)
    return SramUsage(
        total=sum(size for _, size in sizes[largest]),
        parts=parts,
        phase=largest.name,
        limit=target.max_shared,
        formula=_largest(tuple(sizes)),
        formulas=tuple((name, dict(largest.parts)[name]) for name, _ in parts),
    )


@lru_cache(maxsize=1024)  # a space has hundreds of configurations of the same phases
def _largest(phases: tuple[Phase, ...]) -> Any:
    """The total of the phase that needs most, over the sizes of tiles."""
    return sympy.Max(*(phase.total for phase in phases), evaluate=False)


def values_of(plan: KernelPlan, config: KernelConfig) -> dict[str, int]:
    """The number behind every symbol of a formula."""
    return {
        **config.as_dict(),
        "itemsize": plan.itemsize,
        **{s.name: n for s, n in zip(widths("qk", 9), plan.qk_segments, strict=False)},
        **{s.name: n for s, n in zip(widths("v", 9), plan.v_segments, strict=False)},
    }


def largest_fitting(
    config: KernelConfig, usage: Callable[[KernelConfig], SramUsage]
) -> KernelConfig | None:
    """The configuration nearest to one that does not fit; None where nothing smaller does.

    The largest BLOCK_N that fits; with fewer stages if none does; with fewer query rows at last.
    """
    return next((smaller for smaller in _smaller(config) if usage(smaller).fits), None)


def _smaller(config: KernelConfig) -> Iterator[KernelConfig]:
    """This configuration and those below it, nearest first."""
    for block_m in _halvings(config.BLOCK_M):
        for stages in range(config.num_stages, 0, -1):
            for block_n in _halvings(config.BLOCK_N):
                yield replace(config, BLOCK_M=block_m, BLOCK_N=block_n, num_stages=stages)


def _halvings(side: int) -> Iterator[int]:
    while side >= SMALLEST_SIDE:
        yield side
        side //= 2
