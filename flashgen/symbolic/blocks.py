"""Block tables: masks that read ``layout[h, q_idx // 64, kv_idx // 64]``."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.logic import negation_normal_form
from flashgen.symbols import KV_IDX, Q_IDX, FloorDiv, Load


def block_tables(expr: Any) -> tuple[Load, ...]:
    """The elements that a predicate is false without, of tables with a row for each block of rows
    and a column for each block of keys.

    Each is a `Load` with one index ``q_idx // m`` and one ``kv_idx // n``, m and n numbers, and all
    others the same for every row and key: where it is 0, its whole block is hidden.
    """
    found = []
    for element in sorted(expr.atoms(Load), key=str):
        condition = sympy.Ne(element, 0, evaluate=False)
        if _is_blockwise(element) and _without(negation_normal_form(expr), condition) is False:
            found.append(element)
    return tuple(found)


def _is_blockwise(element: Any) -> bool:
    moving = [i for i in element.args[1:] if {Q_IDX, KV_IDX} & i.free_symbols]
    blocks = [i for i in moving if isinstance(i, FloorDiv) and i.args[1].is_Integer]
    return len(moving) == len(blocks) == 2 and {i.args[0] for i in blocks} == {Q_IDX, KV_IDX}


def _without(expr: Any, condition: Any) -> bool | None:
    """What is left of ``expr`` where the condition is false: False, or None for anything else."""
    if expr == condition or expr is sympy.false:
        return False
    hidden = [_without(arg, condition) is False for arg in expr.args]
    if isinstance(expr, sympy.And) and any(hidden):
        return False
    return False if isinstance(expr, sympy.Or) and all(hidden) else None
