"""linear_usage: the shared memory that a block of the kernels of linear attention needs."""

from __future__ import annotations

from functools import cache

import sympy

from flashgen.budget.buffers import Phase
from flashgen.budget.quantities import BLOCK_M, ITEMSIZE, NUM_STAGES
from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan
from flashgen.symbols import evaluate

#: Columns of tiles of q and k, and of v.
QK_WIDTH, V_WIDTH = sympy.symbols("qk_width v_width", integer=True, positive=True)


def linear_usage(
    plan: KernelPlan, config: KernelConfig, target: Target, *, gradients: bool
) -> SramUsage:
    """The shared memory of the functions of one pass.

    Args:
        plan: what they compute.
        config: their configuration.
        target: the architecture.
        gradients: whether they are of the backward pass.
    """
    linear = LinearPlan(plan)
    values = {
        **config.as_dict(),
        "itemsize": plan.itemsize,
        "qk_width": linear.qk_width,
        "v_width": linear.v_width,
    }
    phases = _phases(gradients)
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
        formula=sympy.Max(*(phase.total for phase in phases), evaluate=False),
        formulas=tuple((name, dict(largest.parts)[name]) for name, _ in parts),
    )


@cache
def _phases(gradients: bool) -> tuple[Phase, ...]:
    features, values = (BLOCK_M * width * ITEMSIZE for width in (QK_WIDTH, V_WIDTH))
    state = QK_WIDTH * V_WIDTH
    ahead = sympy.Max(NUM_STAGES - 1, 1)
    return (
        Phase("first state", (("state", 4 * state),)),
        Phase(
            "loop",
            (
                ("Q tiles", ahead * features),
                ("K tiles", ahead * features),
                ("V tiles", NUM_STAGES * values),
                ("features", 2 * features),
                ("output", values),
                ("barriers", 24 * ahead),
            ),
        ),
    )
