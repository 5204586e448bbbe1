"""Plans: all expressions and numbers that a template prints about a kernel, computed beforehand."""

from flashgen.plan.dtypes import TRITON_DTYPES
from flashgen.plan.head_dims import Segment, split_head_dim
from flashgen.plan.kernel import KernelPlan, lower
from flashgen.plan.loops import KeyTiles, Run

__all__ = [
    "TRITON_DTYPES",
    "KernelPlan",
    "KeyTiles",
    "Run",
    "Segment",
    "lower",
    "split_head_dim",
]
