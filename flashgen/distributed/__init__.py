"""Attention over a device mesh: the sequence of a generated module's call, on several ranks.

It needs torch alone, besides modules that were built with ``forms=("dense", "mesh")``.
"""

from flashgen.distributed.attend import ContextParallel, context_parallel
from flashgen.distributed.costs import Cost, Machine
from flashgen.distributed.forecast import Forecast
from flashgen.distributed.layout import Layout
from flashgen.distributed.plan import Plan
from flashgen.distributed.style import ContextParallelStyle

__all__ = [
    "ContextParallel",
    "ContextParallelStyle",
    "Cost",
    "Forecast",
    "Layout",
    "Machine",
    "Plan",
    "context_parallel",
]
