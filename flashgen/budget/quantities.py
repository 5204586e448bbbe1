"""The symbols of the budget's formulas."""

from __future__ import annotations

from functools import cache
from typing import Any

import sympy

BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, ITEMSIZE = sympy.symbols(
    "BLOCK_M BLOCK_N num_warps num_stages itemsize", integer=True, positive=True
)


@cache  # every figure of a kernel asks for them, and sympy takes its time to make symbols
def widths(prefix: str, count: int) -> tuple[Any, ...]:
    """The symbols of segment widths, widest first: ``qk_0, qk_1, ...``."""
    return tuple(sympy.Symbol(f"{prefix}_{i}", integer=True, positive=True) for i in range(count))
