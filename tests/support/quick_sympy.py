"""sympy's Min and Max, without what they find out again and again to the same effect.

Each that is made compares its arguments with one another, by assumptions and then by factors of
their difference: a quarter of the time in which modules are rendered. Substitution makes them anew
of the same arguments, so that six of seven comparisons were made before.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sympy.functions.elementary.miscellaneous import MinMaxBase

#: sympy's own way: which of two arguments is never needed beside the other, if it can tell.
connected_by_sympy = MinMaxBase._is_connected

_connected = lru_cache(1 << 16)(connected_by_sympy)


def _is_connected(cls: Any, x: Any, y: Any) -> Any:
    return _connected(x, y)


def quicken_sympy() -> None:
    """Keeps what comparisons found, in this process: they depend on the two arguments alone."""
    MinMaxBase._is_connected = classmethod(_is_connected)
