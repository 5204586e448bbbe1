"""What the templates print: everything about a kernel, worked out beforehand."""

from flashgen.plan.dtypes import TRITON_DTYPES
from flashgen.plan.head_dims import Segment, split_head_dim
from flashgen.plan.kernel import KernelPlan, lower
from flashgen.plan.loops import KeyTiles, PrintedInterval

__all__ = [
    "TRITON_DTYPES",
    "KernelPlan",
    "KeyTiles",
    "PrintedInterval",
    "Segment",
    "lower",
    "split_head_dim",
]
