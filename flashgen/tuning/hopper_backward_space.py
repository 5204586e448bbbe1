"""hopper_backward_space, rank_hopper_backward: configurations of the Gluon kernel of the backward.

Beside it there are always the portable ones: what the kernel is not made for is left to those.
`why_no_backward` says so in words. A spec's pins are of the forward kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.budget.hopper_backward import worst_hopper_backward_usage, worst_queries_usage
from flashgen.config import HOPPER, KernelConfig
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.plan.hopper_division import CONSUMERS
from flashgen.tuning.space import Space

#: Tiles of queries that are held at once. A second one arrives while the first is computed.
STAGES = (2, 3)

# A consumer is a group of four.
_WARPS = 4 * CONSUMERS


def why_no_backward(names: HopperBackward) -> str:
    """Why a backward pass has no Gluon kernel; ``""`` where it has one."""
    if names.why_not:
        return names.why_not
    space = hopper_backward_space(names)
    if space.candidates:
        return ""
    config, reason = space.rejected[0]
    return f"{config}: {reason}"


def hopper_backward_space(names: HopperBackward) -> Space:
    """The candidates; none where a backward pass has no such kernel.

    Tiles are as the registers have it: beside the gradients of its 64 keys a consumer has room for
    the products with so many queries, and no more.
    """
    if names.why_not:
        return Space((), ())
    shape = (names.block_m, names.block_n, _WARPS)
    beside = worst_queries_usage(names).shortage(HOPPER) if names.both_in_gluon else ""
    reasons = {
        config: worst_hopper_backward_usage(names, config).shortage(HOPPER) or beside
        for config in (KernelConfig(*shape, num_stages=stages) for stages in STAGES)
    }
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if not reason),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def rank_hopper_backward(candidates: Iterable[KernelConfig]) -> list[KernelConfig]:
    """The candidates, most promising first: the fewest stages, since nothing waits for a third."""
    return sorted(candidates, key=lambda config: config.num_stages)
