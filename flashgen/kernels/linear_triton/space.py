"""linear_space: the configurations of the kernels of linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.base import Space
from flashgen.kernels.linear_triton.shared_memory import linear_usage
from flashgen.plan import KernelPlan
from flashgen.plan.linear import WIDEST, LinearPlan

#: Rows of a chunk: products within one grow with it, states of all grow with its inverse.
CHUNKS = (16, 32, 64)

STAGES = {"cuda": (1, 2, 3), "hip": (1, 2)}

# Elements of a state that a thread keeps: more than these and what else a step keeps would spill.
MOST_OF_A_STATE = 64


def linear_space(plan: KernelPlan, target: str, *, gradients: bool) -> Space:
    """The candidates on a target.

    Args:
        plan: what they compute.
        target: the architecture.
        gradients: whether they are of the backward pass.
    """
    architecture = get_target(target)
    reasons = {}
    for config in _all(plan, target):
        usage = linear_usage(plan, config, architecture, gradients=gradients)
        reasons[config] = usage.shortage(target)
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if not reason),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def rank_linear(
    plan: KernelPlan, target: str, candidates: Sequence[KernelConfig], *, gradients: bool
) -> list[KernelConfig]:
    """Long chunks first, which read states seldom; then those with more tiles on their way.

    Where gradients read elements of q and k besides their features, the widest states leave chunks
    of 32 rows registers for that, and no longer ones. Blackwell has states in tensor memory.
    """
    linear = LinearPlan(plan).of_tiles
    widest = linear.qk_width * linear.v_width == WIDEST**2
    reads_more = gradients and (linear.mapped or linear.learned) and not linear.by_features
    short_of_registers = get_target(target).family not in ("blackwell", "cdna3")
    longest = 32 if widest and reads_more and short_of_registers else max(CHUNKS)

    def order(config: KernelConfig) -> tuple[bool, int, int]:
        return longest < config.BLOCK_M, -config.BLOCK_M, -config.num_stages

    return sorted(candidates, key=order)


def _all(plan: KernelPlan, target: str) -> Iterator[KernelConfig]:
    architecture, linear = get_target(target), LinearPlan(plan).of_tiles
    threads = linear.qk_width * linear.v_width // MOST_OF_A_STATE
    warps = max(4, threads // architecture.warp_size)
    blocks = plan.spec.blocks
    chunks = blocks.choices("BLOCK_M") or CHUNKS
    for chunk, stages in product(
        chunks, blocks.choices("num_stages") or STAGES[architecture.backend]
    ):
        yield KernelConfig(chunk, chunk, warps, stages)
