"""Derivations by sympy: a variant's predicate, the tiles to visit, and their source text."""

from flashgen.symbolic.bounds import TileBounds, derive_bounds, derive_q_bounds
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.printer import torch_source, triton_source
from flashgen.symbolic.tables import RangeTable, RowTable
from flashgen.symbolic.trace import Predicate, trace

__all__ = [
    "Interval",
    "Predicate",
    "RangeTable",
    "RowTable",
    "TileBounds",
    "derive_bounds",
    "derive_q_bounds",
    "torch_source",
    "trace",
    "triton_source",
    "with_row_tables",
]
