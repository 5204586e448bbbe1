"""CacheForm: `cache_attention`, `append` and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.forms.base import Form, Held
from flashgen.kernels.cache_triton.kernel import render_cache
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
        """The cache kernel."""
        return render_cache(plan, alone=False)

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """The page sizes, and the columns of a tile that is appended."""
        widest = max(plan.qk_head_dim, plan.v_head_dim)
        return {"page_sizes": PAGE_SIZES, "append_width": 1 << (widest - 1).bit_length()}
