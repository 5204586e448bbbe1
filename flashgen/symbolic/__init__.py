"""What sympy knows about a variant: its predicate, the tiles to visit, and their source text."""

from flashgen.symbolic.bounds import TileBounds, derive_bounds
from flashgen.symbolic.intervals import KvInterval
from flashgen.symbolic.printer import torch_source, triton_source
from flashgen.symbolic.trace import Predicate, trace

__all__ = [
    "KvInterval",
    "Predicate",
    "TileBounds",
    "derive_bounds",
    "torch_source",
    "trace",
    "triton_source",
]
