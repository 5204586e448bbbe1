"""Block tables: masks that read ``layout[h, q_idx // 64, kv_idx // 64]``.

No interval of keys says what such a table shows. A kernel walks its entries instead: a mask P is
contained in ``P without the element | (element & P with it)``, and where the element is 0 for a
whole tile, only the former has to be visited.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from flashgen.symbolic.affine import linearise
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_IDX, Q_IDX, FloorDiv, Load


def block_tables(expr: Any) -> tuple[Load, ...]:
    """The elements in a predicate of tables with a row for each block of rows and a column for each
    block of keys, which occur as conditions.

    Each is a `Load` with one index ``(q_idx + ...) // m`` and one ``(kv_idx + ...) // n``; the
    divisors and all other indices are the same for every row and key.
    """
    elements = sorted(expr.atoms(Load), key=str)
    return tuple(e for e in elements if _is_blockwise(e) and not _known(expr, e, True).has(e))


def where_block(predicate: Predicate, element: Load, shown: bool) -> Predicate:
    """The predicate where an element of a block table is 1 (``shown``) or 0."""
    return replace(predicate, expr=_known(predicate.expr, element, shown))


def _known(expr: Any, element: Load, shown: bool) -> Any:
    is_set, is_clear = (relation(element, 0, evaluate=False) for relation in (sympy.Ne, sympy.Eq))
    return expr.xreplace({is_set: sympy.sympify(shown), is_clear: sympy.sympify(not shown)})


def _is_blockwise(element: Load) -> bool:
    positions = {Q_IDX, KV_IDX}
    moving = [index for index in element.args[1:] if positions & index.free_symbols]
    if not all(isinstance(index, FloorDiv) for index in moving):
        return False
    if any(positions & index.args[1].free_symbols for index in moving):
        return False
    numerators = [linearise(index.args[0], frozenset(positions)) for index in moving]
    factors = [
        {position: n.coefficient(position) for position in positions if n.coefficient(position)}
        for n in numerators
        if n is not None
    ]
    return len(moving) == 2 and all(f in factors for f in ({Q_IDX: 1}, {KV_IDX: 1}))
