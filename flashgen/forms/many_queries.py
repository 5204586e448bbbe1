"""Many queries of a cache's sequences: which of them the Gluon forward kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.config import KernelChoice
from flashgen.forms.base import Held
from flashgen.forms.varlen import packed_gluon, why_no_gluon
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import KernelPlan

#: Rows of a sequence, queries times heads that share keys, and keys of a page from which on the
#: Gluon kernel may compute a call.
LEAST_ROWS, LEAST_PAGE = 64, 16

#: Rows of a tile of two consumers, and the rows that three compute in the same time: on an H100
#: tiles of 192 have up to 15% the rate of tiles of 128 more.
TWO_CONSUMERS, SLOWER = 128, 147

#: The kernel that computes them.
Kernel = ForwardHopper


def gluon_kernel(plan: KernelPlan, held: Held) -> Kernel | None:
    """The Gluon forward kernel of a module's packed sequences, if it has one."""
    kernels = packed_gluon(plan, held)
    return next((kernel for kernel in kernels if isinstance(kernel, Kernel)), None)


def computes(plan: KernelPlan, rows: int, page_size: int) -> bool:
    """Whether it computes sequences of so many rows, with pages of so many keys, 0 for none."""
    if Kernel().why_not(plan) or why_no_gluon(plan):
        return False
    if page_size and (page_size < LEAST_PAGE or not plan.tiles.from_key_0):
        return False
    return rows >= LEAST_ROWS


def names(plan: KernelPlan, choice: KernelChoice | None) -> Mapping[str, Any]:
    """What templates print of it; its choice is None if it serves no cache."""
    gluon = choice is not None
    return {
        "cached_gluon": gluon,
        "cached_pages": gluon and plan.tiles.from_key_0,
        "cached_packs": gluon and HopperNames(plan, True, True).packs,
        "least_rows": LEAST_ROWS,
        "least_page": LEAST_PAGE,
        "tile_times": () if choice is None else _tile_times(choice),
    }


def _tile_times(choice: KernelChoice) -> tuple[tuple[int, int], ...]:
    """The rows that a tile may have, each with its time in one unit."""
    rows = max(chosen.config.BLOCK_M for chosen in choice.configs.values())
    return ((rows, rows), (TWO_CONSUMERS, SLOWER)) if rows > TWO_CONSUMERS else ((rows, rows),)
