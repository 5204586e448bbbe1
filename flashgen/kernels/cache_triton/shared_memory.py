"""cache_usage: the shared memory of a block of the cache kernel.

Its loop has the buffers of the portable forward kernel that loads through pointers, and up to three
more: the rows of pages, if a tile of keys lies on several of them; the conditions of a mask that
loads an element for each score; and, where values of hidden keys are replaced in registers, which
keys are shown, or the values of a tile. What merges parts comes after the loop and needs less. The
compiler's figure is the same for caches without pages; it may be below this one

- for pages: it may need no exchange of rows, or do it in place of another;
- for values that are replaced: it may have one stage less of them;
- for loaded elements, as in `forward_triton.shared_memory`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import sympy

from flashgen.budget.quantities import BLOCK_M, BLOCK_N
from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage, values_of
from flashgen.config import KernelConfig
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan import KernelPlan
from flashgen.symbols import evaluate

#: Bytes of a row's place, of whether some row sees a key, and of a condition on each backend.
_PLACE, _SHOWN, _CONDITION = 8, 16, {"cuda": 1, "hip": 2}

#: Bytes on their way to an SM from which on more of them come no faster. On an H100 one program
#: with three tiles of 32 KiB ahead was faster than two such programs in each of seven calls.
ENOUGH = 96 * 1024

#: More programs leave more parts to merge.
MOST_PROGRAMS = 2


def cache_usage(
    plan: KernelPlan, config: KernelConfig, target: Target, *, paged: bool = False
) -> SramUsage:
    """The shared memory of a block, for pages of any size or for a cache without pages."""
    usage = sram_usage(plan, config, target, tma=False)
    more = {"page rows": _PLACE * BLOCK_N} if paged else {}
    cache = _cache_of(plan)
    if cache.loads_elements:
        more["conditions"] = _CONDITION[target.backend] * BLOCK_M * BLOCK_N
    if cache.clears_values or (paged and cache.has_gaps):
        if cache.keeps_conditions:
            more["shown keys"] = _SHOWN * BLOCK_N
        else:
            more["replaced values"] = plan.itemsize * sum(plan.v_segments) * BLOCK_N
    values = values_of(plan, config)
    sizes = {name: evaluate(size, values) for name, size in more.items()}
    return replace(
        usage,
        total=usage.total + sum(sizes.values()),
        parts=(*usage.parts, *sizes.items()),
        formula=sympy.Add(usage.formula, *more.values(), evaluate=False) if more else usage.formula,
        formulas=(*usage.formulas, *more.items()),
    )


def programs_of_an_sm(plan: KernelPlan, config: KernelConfig, target: Target) -> int:
    """How many programs an SM runs side by side: as many as fit, until `ENOUGH` is on its way."""
    shared = cache_usage(plan, config, target).total + target.reserved_shared
    needed = -(-ENOUGH // bytes_ahead(plan, config))
    return max(1, min(MOST_PROGRAMS, needed, target.shared_per_sm // shared))


def bytes_ahead(plan: KernelPlan, config: KernelConfig) -> int:
    """Bytes of keys and values on their way to a program while it computes."""
    columns = sum(plan.qk_segments) + sum(plan.v_segments)
    return config.BLOCK_N * columns * plan.itemsize * (config.num_stages - 1)


@cache
def _cache_of(plan: KernelPlan) -> CachePlan:
    return CachePlan(plan)
