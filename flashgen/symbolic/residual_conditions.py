"""Residual conditions: those that a kernel has to evaluate for a single query and key."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, symbol
from flashgen.symbolic.context import Context, within
from flashgen.symbolic.entailment import Facts
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.trace import KEYS_OF_ROWS, Orientation, Predicate
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, FloorDiv, FloorMod


def residual_conditions(
    predicate: Predicate, orientation: Orientation = KEYS_OF_ROWS
) -> tuple[tuple[Any, ...], bool]:
    """The conditions of ``predicate``, solved for one index, without those that the others imply.

    ``q_idx // c == kv_idx // c`` is a range of keys, whose ends are computed once a row. For packed
    documents under a causal mask, for example, the end of a document lies behind the query, so no
    comparison with it is needed. In a kernel over tiles of keys, rows and keys are exchanged.

    Args:
        predicate: the user's own.
        orientation: which index to solve for.

    Returns:
        The conditions, all of which hold for a visible key, and whether ``kv_idx < kv_len`` has to
        be checked, too. A causal mask of equal lengths, for example, implies it.
    """
    context = Context(with_row_tables(predicate, orientation), orientation)
    expr = context.predicate.expr
    if expr is sympy.true:
        return (), True
    terms = list(expr.args) if isinstance(expr, sympy.And) else [expr]
    terms = [solved for term in terms for solved in _solved(term, context)]
    atoms = {term: _atoms(term, context) for term in terms}
    kept = list(terms)
    ways = context.every_way(context.element, expr)
    for term in reversed(terms):
        others = [atom for other in kept if other != term for atom in atoms[other]]
        if atoms[term] and all(way.given(*others).proves_all(atoms[term]) for way in ways):
            kept.remove(term)
    for i, term in enumerate(kept):
        others = [atom for other in kept if other is not term for atom in atoms.get(other, ())]
        kept[i] = _lightened(term, [way.given(*others) for way in ways], context)
        atoms[kept[i]] = atoms[term]
    row = context.scalars.given(*within(Q_IDX, Q_LEN), symbol(KV_IDX))
    known = row.given(*(atom for term in kept for atom in atoms[term]))
    last = symbol(KV_LEN) - 1 - symbol(KV_IDX)
    return tuple(kept), not all(way.proves(last) for way in context.every_way(known, expr))


def _lightened(term: Any, every_way: list[Facts], context: Context) -> Any:
    """The term, with alternatives that lack the parts that the facts prove."""
    if not isinstance(term, sympy.Or):
        return term
    ways = []
    for way in term.args:
        parts = way.args if isinstance(way, sympy.And) else (way,)
        known = {part: _atoms(part, context) for part in parts}
        needed = [
            p
            for p in parts
            if not (known[p] and all(facts.proves_all(known[p]) for facts in every_way))
        ]
        ways.append(sympy.And(*needed))
    return sympy.Or(*ways)


def _solved(term: Any, context: Context) -> list[Any]:
    """Comparisons of the solved index with a row's values, in place of a quotient's comparison."""
    solved = context.orientation.solved
    atoms = _atoms(term, context) if term.has(FloorDiv, FloorMod) else ()
    if not atoms or any(abs(atom.coefficient(solved)) != 1 for atom in atoms):
        return [term]
    rows = [atom.without(solved) * -atom.coefficient(solved) for atom in atoms]
    return [
        sympy.Ge(solved, row.to_sympy(), evaluate=False)
        if atom.coefficient(solved) > 0
        else sympy.Ge(row.to_sympy(), solved, evaluate=False)
        for atom, row in zip(atoms, rows, strict=True)
    ]


def _atoms(term: Any, context: Context) -> tuple[Affine, ...]:
    """The inequalities that a comparison stands for; none for several ways or opaque ones."""
    if not isinstance(term, sympy.core.relational.Relational):
        return ()
    ways = context.read(term)
    return ways[0].atoms if len(ways) == 1 and not ways[0].opaque else ()
