"""linear_space: the configurations of the kernels of linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from flashgen.budget.matrix_units import WARP_GROUP, WARP_GROUP_ROWS
from flashgen.budget.targets import get_target
from flashgen.config import HOPPER, KernelConfig
from flashgen.kernels.base import Space
from flashgen.kernels.linear_triton.shared_memory import linear_usage
from flashgen.plan import KernelPlan
from flashgen.plan.linear import WIDEST, LinearPlan

#: Rows of a chunk: products within one grow with it, states of all grow with its inverse.
CHUNKS = (16, 32, 64)

#: A longer one, for measuring: it reads and multiplies states half as often, and spills in some.
LONG_CHUNK = 128

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
    for config in _all(plan, target, gradients):
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

    Chunks of `LONG_CHUNK` rows, and fewer warps than usual, come last: only a measurement tells
    whether they pay.

    Where gradients read elements of q and k besides their features, the widest states leave chunks
    of 32 rows registers for that, and no longer ones. Blackwell has states in tensor memory.
    """
    linear = LinearPlan(plan).of_tiles
    widest = linear.qk_width * linear.v_width == WIDEST**2
    reads_more = gradients and (linear.mapped or linear.learned) and not linear.by_features
    short_of_registers = get_target(target).family not in ("blackwell", "cdna3")
    longest = 32 if widest and reads_more and short_of_registers else max(CHUNKS)

    usual = _usual_warps(plan, target)

    def order(config: KernelConfig) -> tuple[bool, bool, int, int]:
        further = config.num_warps != usual
        return further, longest < config.BLOCK_M, -config.BLOCK_M, -config.num_stages

    return sorted(candidates, key=order)


def _usual_warps(plan: KernelPlan, target: str) -> int:
    """As many as keep a state without spilling, and at least a group of wgmma's."""
    linear = LinearPlan(plan).of_tiles
    threads = linear.qk_width * linear.v_width // MOST_OF_A_STATE
    return max(WARP_GROUP, threads // get_target(target).warp_size)


def _all(plan: KernelPlan, target: str, gradients: bool) -> Iterator[KernelConfig]:
    blocks, warps = plan.spec.blocks, _usual_warps(plan, target)
    chunks = blocks.choices("BLOCK_M") or CHUNKS
    stages = blocks.choices("num_stages") or STAGES[get_target(target).backend]
    for chunk, ahead in product(chunks, stages):
        yield KernelConfig(chunk, chunk, warps, ahead)
    if gradients or not _has_further(plan, target):
        return
    for ahead in (x for x in stages if x > 1):
        if not blocks.choices("BLOCK_M"):
            yield KernelConfig(LONG_CHUNK, LONG_CHUNK, warps, ahead)
        if warps > WARP_GROUP and WARP_GROUP_ROWS in chunks:
            yield KernelConfig(WARP_GROUP_ROWS, WARP_GROUP_ROWS, WARP_GROUP, ahead)


def _has_further(plan: KernelPlan, target: str) -> bool:
    """Whether the forward pass may have long chunks and few warps, whose memory is then known.

    It is to the byte without decays, whose sums change their layout, and where wgmma reads tiles
    that TMA wrote.
    """
    linear = LinearPlan(plan)
    by_states = linear.causal and not (linear.decayed or linear.vector)
    dense = not plan.spec.has_form("varlen")  # whose functions need a little more
    return by_states and dense and plan.itemsize == 2 and target == HOPPER
