"""hopper_backward_space, rank_hopper_backward: configurations of the Gluon kernel of the backward.

Every module also has the portable kernels, for calls that this kernel does not support. A spec's
pins apply to the forward kernels only.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.config import HOPPER, KernelConfig
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.backward_hopper.shared_memory import worst_hopper_backward_usage
from flashgen.kernels.backward_hopper.split import CONSUMERS
from flashgen.kernels.base import Space

#: Tiles of queries that are held at once. A second one arrives while the first is computed.
STAGES = (2, 3)

#: If consumers take turns, each of them computes one.
STAGES_IN_TURNS = (3, 4)

# A consumer is a group of four.
_WARPS = 4 * CONSUMERS


def hopper_backward_space(names: HopperBackward, beside: str = "") -> Space:
    """The candidates; none where a backward pass has no such kernel.

    Registers fix the tile sizes: beside the gradients of its 64 keys a consumer has registers for
    the products with BLOCK_M queries, and no more.

    Args:
        names: the kernel.
        beside: why the kernel that shares the pass with it does not fit; ``""`` where it does.
    """
    if names.why_not:
        return Space((), ())
    shape = (names.block_m, names.block_n, _WARPS)
    reasons = {
        config: worst_hopper_backward_usage(names, config).shortage(HOPPER) or beside
        for config in (KernelConfig(*shape, num_stages=stages) for stages in stages_of(names))
    }
    return Space(
        candidates=tuple(config for config, reason in reasons.items() if not reason),
        rejected=tuple((config, reason) for config, reason in reasons.items() if reason),
    )


def stages_of(names: HopperBackward) -> tuple[int, ...]:
    """As many as there are buffers of ds, if a stage's tile of pairs arrives in one of them."""
    if names.in_turns:
        return STAGES_IN_TURNS
    return STAGES[:1] if names.tiled_in_ds else STAGES


def rank_hopper_backward(candidates: Iterable[KernelConfig]) -> list[KernelConfig]:
    """The candidates, most promising first: the fewest stages, since nothing waits for a third."""
    return sorted(candidates, key=lambda config: config.num_stages)
