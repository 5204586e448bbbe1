"""Which conditions of a predicate a kernel has to evaluate for a single query and key."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, symbol
from flashgen.symbolic.context import Context, within
from flashgen.symbolic.facts import Facts
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.roles import KEYS_OF_ROWS
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, FloorDiv, FloorMod


def evaluated_conditions(predicate: Predicate) -> tuple[tuple[Any, ...], bool]:
    """The conditions of ``predicate``, solved for kv_idx, without those that the others imply.

    ``q_idx // c == kv_idx // c`` is a range of keys, whose ends are computed once a row. Where ids
    of packed documents meet a causal mask, for example, the end of a document lies behind the query
    and need not be compared with.

    Returns:
        The conditions, all of which hold for a visible key, and whether ``kv_idx < kv_len`` has to
        be checked besides. It follows from a causal mask of equal lengths, for one.
    """
    context = Context(with_row_tables(predicate), KEYS_OF_ROWS)
    expr = context.predicate.expr
    if expr is sympy.true:
        return (), True
    terms = list(expr.args) if isinstance(expr, sympy.And) else [expr]
    terms = [solved for term in terms for solved in _solved(term, context)]
    atoms = {term: _atoms(term, context) for term in terms}
    kept = list(terms)
    for term in reversed(terms):
        others = [atom for other in kept if other != term for atom in atoms[other]]
        if atoms[term] and context.element.given(*others).proves_all(atoms[term]):
            kept.remove(term)
    for i, term in enumerate(kept):
        others = [atom for other in kept if other is not term for atom in atoms.get(other, ())]
        kept[i] = _lightened(term, context.element.given(*others), context)
        atoms[kept[i]] = atoms[term]
    row = context.scalars.given(*within(Q_IDX, Q_LEN), symbol(KV_IDX))
    known = row.given(*(atom for term in kept for atom in atoms[term]))
    return tuple(kept), not known.proves(symbol(KV_LEN) - 1 - symbol(KV_IDX))


def _lightened(term: Any, facts: Facts, context: Context) -> Any:
    """The term without what the facts prove of its alternatives' parts."""
    if not isinstance(term, sympy.Or):
        return term
    ways = []
    for way in term.args:
        parts = way.args if isinstance(way, sympy.And) else (way,)
        known = {part: _atoms(part, context) for part in parts}
        needed = [p for p in parts if not (known[p] and facts.proves_all(known[p]))]
        ways.append(sympy.And(*needed))
    return sympy.Or(*ways)


def _solved(term: Any, context: Context) -> list[Any]:
    """Comparisons of kv_idx with what a row knows, in place of one with divisions."""
    atoms = _atoms(term, context) if term.has(FloorDiv, FloorMod) else ()
    if not atoms or any(abs(atom.coefficient(KV_IDX)) != 1 for atom in atoms):
        return [term]
    rows = [atom.without(KV_IDX) * -atom.coefficient(KV_IDX) for atom in atoms]
    return [
        sympy.Ge(KV_IDX, row.to_sympy(), evaluate=False)
        if atom.coefficient(KV_IDX) > 0
        else sympy.Ge(row.to_sympy(), KV_IDX, evaluate=False)
        for atom, row in zip(atoms, rows, strict=True)
    ]


def _atoms(term: Any, context: Context) -> tuple[Affine, ...]:
    """The inequalities that a comparison stands for; none where it is something else."""
    if not isinstance(term, sympy.core.relational.Relational):
        return ()
    ways = context.read(term)
    return ways[0].atoms if len(ways) == 1 and not ways[0].opaque else ()
