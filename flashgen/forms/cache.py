"""CacheForm: `cache_attention`, `append` and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.codegen.beside import beside
from flashgen.codegen.environment import render
from flashgen.forms import many_queries
from flashgen.forms.base import Form, Held
from flashgen.forms.varlen import Varlen
from flashgen.kernels.base import Needs
from flashgen.kernels.cache_triton.kernel import render_cache
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.plan import KernelPlan

#: The numbers of keys that a page can hold.
PAGE_SIZES = (1, 16, 32, 64, 128, 256)


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
        return render(
            "cache/tiles.py.jinja",
            alone=not plan.spec.has_form(Varlen.name),
            **many_queries.merged(plan),
        )

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
        gluon = _gluon(plan, held)
        return {
            "page_sizes": PAGE_SIZES,
            "sees_all_keys": CachePlan(plan).sees_all_keys,
            "append_width": 1 << (widest - 1).bit_length(),
            **many_queries.names(plan, None if gluon is None else held[gluon.key]),
        }


def _sees_what_it_visits(plan: KernelPlan) -> bool:
    cache = CachePlan(plan)
    return cache.derived and not cache.has_gaps


def serves_gluon(plan: KernelPlan, call: many_queries.Call) -> bool:
    """Whether the Gluon kernel may compute a call on Hopper; `fills` says whether it does."""
    return _sees_what_it_visits(plan) and many_queries.serves(plan, call)


def _gluon(plan: KernelPlan, held: Held) -> many_queries.Kernel | None:
    """The Gluon forward kernel, if it serves a cache as well.

    Keys within the bounds that no query sees may lie in pages that are not there, or are another
    sequence's: it has to visit no such pages.
    """
    return many_queries.gluon_kernel(plan, held) if _sees_what_it_visits(plan) else None
