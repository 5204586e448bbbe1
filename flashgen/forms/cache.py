"""CacheForm: `cache_attention`, `append` and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.beside import beside
from flashgen.codegen.environment import render
from flashgen.config import KernelChoice
from flashgen.forms.base import Form, Held
from flashgen.forms.varlen import Varlen, packed_gluon, why_no_gluon
from flashgen.kernels.base import Needs
from flashgen.kernels.cache_triton.kernel import render_cache
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.kernels.forward_hopper.kernel import ForwardHopper
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import KernelPlan

#: The numbers of keys that a page can hold.
PAGE_SIZES = (1, 16, 32, 64, 128, 256)

#: Rows of a sequence, queries times heads that share keys, and keys of a page from which on the
#: Gluon kernel may compute a call.
LEAST_ROWS, LEAST_PAGE = 64, 16

#: Rows of a tile of two consumers, and the rows that three compute in the same time: on an H100
#: tiles of 192 have up to 15% the rate of tiles of 128 more.
TWO_CONSUMERS, SLOWER = 128, 147


class CacheForm(Form):
    """Queries against a cache of keys and values, in pages or in rows of one tensor."""

    name = "cache"

    def why_not(self, plan: KernelPlan) -> str:
        """A mask or score without an alignment, or dropout."""
        if plan.equal_lengths:
            return plan.refuses_lengths
        if plan.dropout:
            return "weights are not dropped at random where keys are cached"
        return ""

    def source(self, plan: KernelPlan, held: Held) -> str:
        """The kernels that list tiles for the Gluon kernel and fill rows, or the cache kernel.

        That one is in the module anyway, and no text is there twice.
        """
        if _gluon(plan, held) is None:
            return render_cache(plan, alone=False)
        return render("cache/tiles.py.jinja", alone=not plan.spec.has_form(Varlen.name))

    def gluon_source(self, plan: KernelPlan, held: Held) -> str:
        """The Gluon forward kernel for sequences with many queries."""
        kernel = _gluon(plan, held)
        if kernel is None:
            return ""
        known = [kernel.source(plan)]
        if plan.spec.has_form(Varlen.name):
            known.append(Varlen().gluon_source(plan, held))
        return beside(kernel.cached_source(plan), "\n".join(known), "_cached")

    def needs(self, plan: KernelPlan, held: Held) -> Needs:
        """The Gluon kernel takes tiles from a counter, and clears rows without a key."""
        if _gluon(plan, held) is None:
            return Needs()
        return Needs(counter=True, clears=True, l2=plan.tiles.uneven)

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """The page sizes, and the columns of a tile that is appended; what the Gluon kernel can."""
        widest = max(plan.qk_head_dim, plan.v_head_dim)
        gluon = _gluon(plan, held) is not None
        return {
            "page_sizes": PAGE_SIZES,
            "append_width": 1 << (widest - 1).bit_length(),
            "cached_gluon": gluon,
            "cached_pages": gluon and plan.tiles.from_key_0,
            "cached_packs": gluon and HopperNames(plan, True, True).packs,
            "least_rows": LEAST_ROWS,
            "least_page": LEAST_PAGE,
            "tile_times": _tile_times(held["hopper"]) if gluon else (),
        }


def _sees_what_it_visits(plan: KernelPlan) -> bool:
    cache = CachePlan(plan)
    return cache.derived and not cache.has_gaps


def may_run_gluon(plan: KernelPlan, rows: int, page_size: int) -> bool:
    """Whether the Gluon kernel computes sequences of so many rows, if there are enough for its SMs.

    Args:
        plan: of the module.
        rows: queries times heads that share keys.
        page_size: 0 for rows of one tensor.
    """
    if ForwardHopper().why_not(plan) or why_no_gluon(plan) or not _sees_what_it_visits(plan):
        return False
    if page_size and (page_size < LEAST_PAGE or not plan.tiles.from_key_0):
        return False
    return rows >= LEAST_ROWS


def _tile_times(choice: KernelChoice) -> tuple[tuple[int, int], ...]:
    """The rows that a tile of the Gluon kernel may have, each with its time in one unit."""
    rows = max(chosen.config.BLOCK_M for chosen in choice.configs.values())
    return ((rows, rows), (TWO_CONSUMERS, SLOWER)) if rows > TWO_CONSUMERS else ((rows, rows),)


def _gluon(plan: KernelPlan, held: Held) -> ForwardHopper | None:
    """The Gluon forward kernel, if it serves a cache as well.

    Keys within the bounds that no query sees may lie in pages that are not there, or are another
    sequence's: it has to visit no such pages.
    """
    if not _sees_what_it_visits(plan):
        return None
    kernels = packed_gluon(plan, held)
    return next((kernel for kernel in kernels if isinstance(kernel, ForwardHopper)), None)
