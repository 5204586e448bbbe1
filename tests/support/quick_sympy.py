"""sympy's Min and Max, without what they find out again and again to the same effect.

Each that is made compares its arguments with one another, by assumptions and then by factors of
their difference: a quarter of the time in which modules are rendered. Substitution makes them anew
of the same arguments, so that six of seven comparisons were made before. Of the others, sympy asks
each question twice, as ``x >= y`` and as ``y <= x``, and many without hope.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sympy import Expr, Max, Min, S, Symbol, factor_terms
from sympy.functions.elementary.miscellaneous import MinMaxBase

#: sympy's own way: which of two arguments is never needed beside the other, if it can tell.
connected_by_sympy = MinMaxBase._is_connected


@lru_cache(1 << 16)
def _connected(x: Any, y: Any) -> Any:
    if _of_any_sign(x, y):
        return False
    for _ in range(2):
        if x == y:
            return True
        for a, b, larger, smaller in ((x, y, Max, Min), (y, x, Min, Max)):
            try:
                known = a >= b
            except TypeError:
                return False
            if not known.is_Relational:
                return larger if known else smaller
        x, y = factor_terms(x - y), S.Zero
    return False


def _of_any_sign(x: Any, y: Any) -> bool:
    """Whether a difference has a number of times a symbol of which the sign is not known.

    Where nothing else depends on the symbol, nobody can tell which of the two is larger.
    """
    if not (isinstance(x, Expr) and isinstance(y, Expr)):
        return False
    terms = [(term, term.as_coeff_Mul()[1]) for term in (x - y).as_ordered_terms()]
    for term, symbol in terms:
        if not (isinstance(symbol, Symbol) and symbol.is_extended_real):
            continue
        signs = symbol.is_extended_nonnegative, symbol.is_extended_nonpositive
        others = (other for other, _ in terms if other is not term)
        if signs == (None, None) and all(symbol not in other.free_symbols for other in others):
            return True
    return False


def _is_connected(cls: Any, x: Any, y: Any) -> Any:
    return _connected(x, y)


def quicken_sympy() -> None:
    """Keeps what comparisons found, in this process: they depend on the two arguments alone."""
    MinMaxBase._is_connected = classmethod(_is_connected)
