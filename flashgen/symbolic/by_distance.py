"""Terms of a score that depend on the distance from a query to a key, and not on the product.

A tile has far fewer distances than pairs, so that a kernel may compute such terms once for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

import sympy

from flashgen.symbolic.affine import summands
from flashgen.symbolic.varies_over import DISTANCE, SCORES, Axes, OfDistance, varies_over
from flashgen.symbols import KV_IDX, Q_IDX, Load, Truncate

_DISTANCE = sympy.Dummy("distance", integer=True)


@lru_cache(maxsize=1024)  # of a term, its whole and its parts ask
def by_distance(expr: Any) -> Any:
    """An expression of the distance kv_idx - q_idx, with `KV_IDX` for it; None if it is none.

    Such an expression does not change when query and key move by the same amount.
    """
    moved = _cancelled(expr.xreplace({Q_IDX: KV_IDX - _DISTANCE}))
    return None if KV_IDX in moved.free_symbols else moved.xreplace({_DISTANCE: KV_IDX})


def with_distances(expr: Any) -> tuple[Any, dict[Any, Any]]:
    """An expression with symbols for its costly terms of a distance, and these over `DISTANCE`.

    Costly is what loads an element, or takes a logarithm.
    """
    found = _Terms({symbol.name for symbol in expr.free_symbols})
    return _replaced(expr, found), {symbol: term for term, symbol in found.symbols.items()}


class _Terms:
    """Terms of a distance over `DISTANCE`, each with its symbol.

    Args:
        taken: names that no symbol may have.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self.symbols: dict[Any, Any] = {}
        numbered = (f"of_distance_{i}" for i in itertools.count())
        self._names = (name for name in numbered if name not in taken)

    def symbol_of(self, node: Any) -> Any:
        """The symbol of a term, over query and key."""
        term = by_distance(node).xreplace({KV_IDX: DISTANCE})
        if term not in self.symbols:
            self.symbols[term] = OfDistance(next(self._names), real=True)
        return self.symbols[term]


def _replaced(node: Any, found: _Terms) -> Any:
    if not node.args or varies_over(node) != Axes.ELEMENT:
        return node
    if _of_distance(node):
        return found.symbol_of(node)
    args = list(node.args)
    if node.is_Add or node.is_Mul:
        costly = [arg for arg in args if _of_distance(arg)]
        if len(costly) > 1:
            rest = [arg for arg in args if arg not in costly]
            others = (_replaced(arg, found) for arg in rest)
            return node.func(found.symbol_of(node.func(*costly)), *others)
    return node.func(*(_replaced(arg, found) for arg in args))


def _of_distance(node: Any) -> bool:
    if varies_over(node) != Axes.ELEMENT or not node.free_symbols.isdisjoint({SCORES}):
        return False
    if not isinstance(node, sympy.Expr) or node.is_integer:
        return False
    costly: Iterable[Any] = node.atoms(Load, sympy.log, Truncate)
    return any(varies_over(x) == Axes.ELEMENT for x in costly) and by_distance(node) is not None


def _cancelled(node: Any) -> Any:
    """``node`` with those sums multiplied out in which the key's position may cancel."""
    if KV_IDX not in node.free_symbols or not node.args:
        return node
    node = node.func(*map(_cancelled, node.args))
    if isinstance(node, sympy.core.relational.Relational):
        return node.func(_cancelled(node.lhs - node.rhs), 0)
    return sympy.Add(*summands(node)) if node.is_Add else node
