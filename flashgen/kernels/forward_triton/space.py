"""search_space: the configurations of a kernel worth trying on a target, and why no others.

A spec's pins and choices replace flashgen's own lists, and no rule rejects them: rules reject only
numbers that flashgen itself proposed. A configuration that does not fit is rejected in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from flashgen.budget.matrix_units import matrix_unit
from flashgen.budget.occupancy import TENSOR_MEMORY_COLUMNS, register_limit
from flashgen.budget.targets import Target, get_target
from flashgen.config import KernelConfig
from flashgen.kernels.base import Space
from flashgen.kernels.forward_triton.occupancy import (
    live_values,
    loads_elements,
    occupancy,
    tensor_memory_columns,
)
from flashgen.kernels.forward_triton.shared_memory import worst_usage
from flashgen.plan import KernelPlan

Lists = Mapping[str, tuple[int, ...]]

USUAL: dict[str, Lists] = {
    "cuda": {
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    # A third stage would only hold more of the 64 KiB: loads go through registers either way.
    "hip": {
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2),
    },
}

#: Where none of the usual ones fits.
SMALL: Lists = {
    "BLOCK_M": (16, 32, 64),
    "BLOCK_N": (16, 32),
    "num_warps": (4,),
    "num_stages": (1, 2),
}

# The share of a thread's registers that accumulator, scores and operands can take; the AMD
# compiler holds more of the next steps' values besides.
LIVE_SHARE = {"cuda": 0.9, "hip": 0.75}

# From so many small programs on an SM some compute while the others wait for what they load.
SMALL_PROGRAM, PROGRAMS_THAT_OVERLAP = 64, 2

# A pipeline stage of 64 keys that takes this share of shared memory makes 32 keys worth trying.
WIDE_STAGE = 0.25


def search_space(plan: KernelPlan, target: str) -> Space:
    """The candidates of a kernel on a target."""
    architecture = get_target(target)
    usual = _judge(plan, architecture, USUAL[architecture.backend])
    if usual.candidates:
        return usual
    small = _judge(plan, architecture, SMALL)
    seen = dict(usual.rejected)
    later = tuple((c, why) for c, why in small.rejected if c not in seen)
    return Space(small.candidates, usual.rejected + later)


def _judge(plan: KernelPlan, target: Target, lists: Lists) -> Space:
    """Every combination of the lists and the spec's choices, whether or not it fits."""
    reasons = {config: _does_not_fit(plan, config, target) for config in _all(plan, lists)}
    fitting = [config for config, reason in reasons.items() if reason is None]
    unwise = {config: _unwise(plan, config, target) for config in fitting}
    if all(unwise.values()):  # a pin leaves nothing better
        unwise = dict.fromkeys(fitting)
    reasons.update(unwise)
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if reason is None),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def _all(plan: KernelPlan, lists: Lists) -> Iterator[KernelConfig]:
    """The product of the spec's choices and, where it makes none, of the lists."""
    chosen = {name: plan.spec.blocks.choices(name) or values for name, values in lists.items()}
    for numbers in product(*chosen.values()):
        yield KernelConfig(**dict(zip(chosen, numbers, strict=True)))


def _does_not_fit(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    usage = worst_usage(plan, config, target)
    if shortage := usage.shortage(target.name):
        return shortage
    if matrix_unit(plan, config, target) == "tcgen05":
        columns = tensor_memory_columns(plan, config)
        if columns > TENSOR_MEMORY_COLUMNS:
            return f"needs {columns} columns of tensor memory, an SM has {TENSOR_MEMORY_COLUMNS}"
    synchronous = config.num_stages == 1
    if synchronous and plan.mixes_widths and matrix_unit(plan, config, target) == "wgmma":
        # ptxas 12.8; Triton issues 10486 and 11366. tests/compile/test_addresses.py shows it.
        return "one stage copies synchronously: tiles of unequal widths get wrong addresses"
    return None


def _unwise(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    """Why a configuration that fits is not worth trying, by the first rule that says so."""
    for fields, rule in RULES:
        if all(plan.spec.blocks.choices(name) is not None for name in fields):
            continue  # the user's own numbers
        if reason := rule(plan, config, target):
            return reason
    return None


def _idle_warps(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    rows = config.BLOCK_M // config.num_warps
    if rows < 16:
        return f"{config.num_warps} warps get {rows} query rows each; a matrix product has 16"
    return None


def _spills(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    live, limit = live_values(plan, config, target), register_limit(config, target)
    if live > LIVE_SHARE[target.backend] * limit:
        return f"a step keeps {live} of a thread's {limit} registers busy: it would spill"
    return None


def _short_steps(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    if loads_elements(plan) and _spills(plan, replace(config, BLOCK_N=64), target):
        return None  # the elements of 64 keys are too many for a thread
    columns = sum(plan.qk_segments) + sum(plan.v_segments)
    stage_of_64 = 64 * columns * plan.itemsize
    if config.BLOCK_N < 64 and stage_of_64 < WIDE_STAGE * target.max_shared:
        return f"steps of {config.BLOCK_N} keys reduce and rescale twice as often as steps of 64"
    return None


def _waits_alone(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    if target.backend != "cuda" or config.num_stages > 1:
        return None
    programs = occupancy(plan, config, target).blocks
    if config.BLOCK_M > SMALL_PROGRAM or programs < PROGRAMS_THAT_OVERLAP:
        return f"one stage loads nothing ahead, and {programs} such programs share an SM"
    return None


def _half_a_unit(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    if matrix_unit(plan, config, target) == "tcgen05" and config.BLOCK_M < 128:
        return "the tensor cores of this target compute 128 rows at a time"
    return None


def _split_columns(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    if matrix_unit(plan, config, target) != "mma.sync" or len(plan.v_segments) > 1:
        return None
    columns = plan.v_segments[0]
    if config.BLOCK_M < columns <= max(USUAL[target.backend]["BLOCK_M"]):
        return (
            f"warps share {config.BLOCK_M} rows of {columns} columns out by columns: weights and "
            "row maxima would pass through shared memory"
        )
    return None


def _copies_too_small(plan: KernelPlan, config: KernelConfig, target: Target) -> str | None:
    threads = config.num_warps * target.warp_size
    narrowest = min(*plan.qk_segments, *plan.v_segments)
    share = config.BLOCK_N * narrowest * plan.itemsize / threads
    if config.num_stages > 1 and share < 4:
        return (
            f"a thread's share of {config.BLOCK_N} x {narrowest} keys is {share:g} bytes; "
            "asynchronous copies move 4 at least"
        )
    return None


#: The rules, each with the numbers it is about.
RULES: tuple[
    tuple[Iterable[str], Callable[[KernelPlan, KernelConfig, Target], str | None]], ...
] = (
    (("BLOCK_M", "num_warps"), _idle_warps),
    (("BLOCK_M", "BLOCK_N", "num_warps"), _spills),
    (("BLOCK_N",), _short_steps),
    (("num_stages",), _waits_alone),
    (("BLOCK_M",), _half_a_unit),
    (("BLOCK_M",), _split_columns),
    (("BLOCK_N", "num_warps"), _copies_too_small),
)
