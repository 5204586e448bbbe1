"""backward_space: the configurations of a backward kernel worth trying, and why no others.

A spec's pins apply to the forward kernels only; backward kernels have their own tile sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from flashgen.budget.occupancy import TENSOR_MEMORY_COLUMNS, register_limit
from flashgen.budget.targets import Target, get_target
from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.occupancy import (
    backward_blocks,
    backward_live_values,
    backward_tensor_memory,
)
from flashgen.kernels.backward_triton.shared_memory import (
    backward_unit,
    held_rows,
    worst_backward_usage,
)
from flashgen.kernels.base import Space
from flashgen.plan import KernelPlan

#: BLOCK_M, BLOCK_N and warps: accumulators of two gradients leave room for few.
SHAPES: dict[BackwardKernel, tuple[tuple[int, int, int], ...]] = {
    "keys": (
        (32, 32, 4),
        (32, 64, 4),
        (64, 64, 4),
        (128, 64, 4),
        (32, 128, 4),
        (32, 64, 8),
        (64, 64, 8),
        (64, 128, 8),
        (128, 128, 8),
    ),
    "queries": (
        (64, 32, 4),
        (64, 64, 4),
        (128, 32, 4),
        (64, 64, 8),
        (128, 32, 8),
        (128, 64, 8),
        (128, 128, 8),
    ),
}
STAGES = {"cuda": (1, 2, 3), "hip": (1, 2)}

#: Where none of these is left.
SMALL: dict[BackwardKernel, tuple[tuple[int, int, int], ...]] = {
    "keys": ((16, 16, 4), (16, 32, 4), (32, 32, 4)),
    "queries": ((16, 16, 4), (32, 16, 4), (32, 32, 4)),
}

# The share of a thread's registers that gradients, scores and operands can take; what is above it
# by little spills little. Gradients of keys leave less, since p is needed after ds is.
LIVE_SHARE: dict[tuple[str, BackwardKernel], float] = {
    ("cuda", "keys"): 0.76,
    ("cuda", "queries"): 0.82,
    ("hip", "keys"): 0.58,
    ("hip", "queries"): 0.58,
}

# Rows of one matrix product.
_ROWS = 16

# Steps of so many rows are long enough.
_LONG_STEP = 64

# Up to this share of its registers a thread has room for more loads under way.
EASY_SHARE = 0.7

# Held rows that leave nothing to be wished for: what the tensor cores compute at a time, or more
# than which would hardly save loads.
ENOUGH_ROWS = {"ampere": 64, "hopper": 64, "blackwell": 128, "cdna3": 64}


def backward_space(plan: KernelPlan, kernel: BackwardKernel, target: str) -> Space:
    """The candidates of a backward kernel on a target; none where no tiles fit."""
    architecture = get_target(target)
    usual = _judge(plan, kernel, architecture, SHAPES[kernel])
    if usual.candidates:
        return usual
    small = _judge(plan, kernel, architecture, SMALL[kernel])
    candidates = small.candidates or _fitting(plan, kernel, architecture)
    reasons = {**dict(usual.rejected), **dict(small.rejected)}
    rejected = tuple((c, why) for c, why in reasons.items() if c not in candidates)
    return Space(candidates, rejected)


def _judge(
    plan: KernelPlan,
    kernel: BackwardKernel,
    target: Target,
    shapes: Iterable[tuple[int, int, int]],
) -> Space:
    reasons = {
        config: _does_not_fit(plan, kernel, config, target) or _unwise(plan, kernel, config, target)
        for config in _all(shapes, target)
    }
    rows = {c: held_rows(kernel, c) for c, reason in reasons.items() if reason is None}
    # Fewer than enough are for where so many do not fit.
    best = min(max(rows.values(), default=0), ENOUGH_ROWS[target.family])
    reasons |= {
        config: f"programs with {held} rows read the others more often than those with {best}"
        for config, held in rows.items()
        if held < best
    }
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if reason is None),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def _fitting(plan: KernelPlan, kernel: BackwardKernel, target: Target) -> tuple[KernelConfig, ...]:
    """The small configurations that fit, recommended or not."""
    configs = _all(SMALL[kernel], target)
    return tuple(c for c in configs if not _does_not_fit(plan, kernel, c, target))


def _all(shapes: Iterable[tuple[int, int, int]], target: Target) -> Iterator[KernelConfig]:
    for shape, stages in product(shapes, STAGES[target.backend]):
        yield KernelConfig(*shape, stages)


def _does_not_fit(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    usage = worst_backward_usage(plan, kernel, config, target)
    if shortage := usage.shortage(target.name):
        return shortage
    unit = backward_unit(plan, kernel, config, target)
    if unit == "tcgen05":
        columns = backward_tensor_memory(plan, kernel, config)
        if columns > TENSOR_MEMORY_COLUMNS:
            return f"needs {columns} columns of tensor memory, an SM has {TENSOR_MEMORY_COLUMNS}"
    if config.num_stages == 1 and plan.mixes_widths and unit == "wgmma":
        # As of the forward kernel: flashgen.tuning.space.
        return "one stage copies synchronously: tiles of unequal widths get wrong addresses"
    return None


def _unwise(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    """Why a configuration that fits is not worth trying, by the first rule that says so."""
    reasons = (rule(plan, kernel, config, target) for rule in RULES)
    return next((reason for reason in reasons if reason), None)


def _spills(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    live = backward_live_values(plan, kernel, config, target)
    limit = register_limit(config, target)
    if live > LIVE_SHARE[target.backend, kernel] * limit:
        return f"a step keeps {live} of a thread's {limit} registers busy: it would spill"
    return None


def _idle_warps(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    half = replace(config, num_warps=config.num_warps // 2)
    rows = held_rows(kernel, config) // config.num_warps
    if rows >= _ROWS or half.num_warps < 4:
        return None
    # Warps of CUDA that have no rows of their own share out columns, and with them registers.
    if target.backend == "hip" or not _spills(plan, kernel, half, target):
        return f"{config.num_warps} warps have {rows} rows each, a matrix product has {_ROWS}"
    return None


def _short_steps(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    longer = (
        replace(config, BLOCK_M=2 * config.BLOCK_M)
        if kernel == "keys"
        else replace(config, BLOCK_N=2 * config.BLOCK_N)
    )
    visited = config.BLOCK_M if kernel == "keys" else config.BLOCK_N
    live = backward_live_values(plan, kernel, longer, target)
    listed = (longer.BLOCK_M, longer.BLOCK_N, longer.num_warps) in SHAPES[kernel]
    if not listed or visited >= _LONG_STEP or live > EASY_SHARE * register_limit(config, target):
        return None
    if _does_not_fit(plan, kernel, longer, target) or _spills(plan, kernel, longer, target):
        return None
    return f"steps of {visited} wait twice as often as steps of {2 * visited}"


def _waits_alone(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    if target.backend != "cuda" or config.num_stages > 1:
        return None
    unit = backward_unit(plan, kernel, config, target)
    if unit not in ("wgmma", "tcgen05"):
        return "one stage loads nothing ahead, and what it loads changes layout on the way"
    visited = config.BLOCK_M + config.BLOCK_N - held_rows(kernel, config)
    if visited < _LONG_STEP:
        return f"one stage loads nothing ahead, and steps of {visited} rows wait often"
    two = replace(config, num_stages=2)
    blocks = backward_blocks(plan, kernel, config, target)
    if blocks < 2 and _does_not_fit(plan, kernel, two, target) is None:
        return "one stage loads nothing ahead, and no other such program shares the SM"
    return None


def _copies_too_small(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> str | None:
    threads = config.num_warps * target.warp_size
    visited = config.BLOCK_M + config.BLOCK_N - held_rows(kernel, config)
    narrowest = min(*plan.qk_segments, *plan.v_segments)
    share = visited * narrowest * plan.itemsize / threads
    if config.num_stages > 1 and share < 4:
        return (
            f"a thread's share of {visited} x {narrowest} elements is {share:g} bytes; "
            "asynchronous copies move 4 at least"
        )
    return None


#: The rules.
RULES: tuple[Callable[[KernelPlan, BackwardKernel, KernelConfig, Target], str | None], ...] = (
    _spills,
    _idle_warps,
    _short_steps,
    _waits_alone,
    _copies_too_small,
)
