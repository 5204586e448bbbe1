"""merging: the constants of the kernels that merge parts of the keys."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.plan import KernelPlan

#: Parts that one kernel of a module's `merge` takes: more are rare, and each has two pointers.
MOST_MERGED = 8

#: Elements of a program: eight of each thread of four warps, a load of 16 bytes of 16-bit ones.
ELEMENTS = 1024


def merging(plan: KernelPlan) -> Mapping[str, int]:
    """What templates print: parts, columns of a tile as a power of two, and rows of a program."""
    width = 1 << (plan.v_head_dim - 1).bit_length()
    return {
        "most_merged": MOST_MERGED,
        "merged_width": width,
        "merged_rows": max(1, ELEMENTS // width),
    }
