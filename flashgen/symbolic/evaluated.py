"""Which conditions of a predicate a kernel has to evaluate for a single query and key."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, symbol
from flashgen.symbolic.context import Context, within
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.roles import KEYS_OF_ROWS
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN


def evaluated_conditions(predicate: Predicate) -> tuple[tuple[Any, ...], bool]:
    """The conditions of ``predicate`` without those that the others imply.

    Where ids of packed documents meet a causal mask, for example, the end of a document lies behind
    the query and need not be compared with.

    Returns:
        The conditions, all of which hold for a visible key, and whether ``kv_idx < kv_len`` has to
        be checked besides. It follows from a causal mask of equal lengths, for one.
    """
    context = Context(with_row_tables(predicate), KEYS_OF_ROWS)
    expr = context.predicate.expr
    if expr is sympy.true:
        return (), True
    terms = list(expr.args) if isinstance(expr, sympy.And) else [expr]
    atoms = {term: _atoms(term, context) for term in terms}
    kept = list(terms)
    for term in reversed(terms):
        others = [atom for other in kept if other != term for atom in atoms[other]]
        if atoms[term] and context.element.given(*others).proves_all(atoms[term]):
            kept.remove(term)
    row = context.scalars.given(*within(Q_IDX, Q_LEN), symbol(KV_IDX))
    known = row.given(*(atom for term in kept for atom in atoms[term]))
    return tuple(kept), not known.proves(symbol(KV_LEN) - 1 - symbol(KV_IDX))


def _atoms(term: Any, context: Context) -> tuple[Affine, ...]:
    """The inequalities that a comparison stands for; none where it is something else."""
    if not isinstance(term, sympy.core.relational.Relational):
        return ()
    ways = context.read(term)
    return ways[0].atoms if len(ways) == 1 and not ways[0].opaque else ()
