"""Projects the keys that single rows see to keys that some row, or every row, of a tile sees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, eliminate, linearise, symbol
from flashgen.symbolic.context import Context
from flashgen.symbolic.quotients import ceil_div, floor_div
from flashgen.symbols import FloorDiv

#: An elimination that makes more inequalities than this is skipped; shipped masks make up to 18.
MAX_PAIRS = 256


def seen_by_some_row(atoms: Iterable[Affine], context: Context) -> tuple[list[Affine], bool, bool]:
    """The atoms projected along the rows of a tile; whether they are exact; whether loosened.

    Every term that differs from row to row becomes a variable, as the row itself is: between its
    least and its greatest value in the tile, and linked to the row and to other terms.
    Fourier-Motzkin eliminates all variables. If a variable would leave too many inequalities, each
    inequality takes its least or its greatest value instead, whichever satisfies it more easily.
    """
    row, facts = context.orientation.tile, context.tile
    system = [together(atom, context) for atom in atoms]
    variables: list[Any] = [row]
    for atom in system:  # grows during the iteration: axioms bring further terms
        for term, _ in context.moving(atom):
            if term not in variables:
                variables.append(term)
                least, greatest = context.extremes(term)
                system += [symbol(term) - least, greatest - symbol(term)]
                system += [a for a in context.axioms_of_seen(term) if context.moving(a)]
    system += [
        symbol(row) - symbol(context.orientation.first),
        symbol(context.orientation.last) - symbol(row),
    ]
    exact = all(_is_defined_by_axioms(term, variables) for term in variables[1:])
    loosened = False
    while variables:
        term = variables[0] if row in variables else _cheapest(system, variables)
        variables.remove(term)
        moving = {*variables, context.orientation.solved}
        system = [_divided(atom, term, moving) for atom in system]
        if _pairs(system, term) > MAX_PAIRS:
            system, loosened = [_loosened(atom, term, context) for atom in system], True
        else:
            system, doubts = eliminate(system, term)
            exact = exact and facts.given(*system).proves_all(doubts)
        system = _irredundant(system)
    return system, exact and not loosened, loosened


def seen_by_every_row(atoms: Iterable[Affine], context: Context) -> list[Affine]:
    """The atoms at their least values in the tile: each term at its worse end of the tile."""
    worst = []
    for atom in atoms:
        hardest = together(atom, context)
        for term, c in context.moving(hardest):
            least, greatest = context.extremes(term)
            hardest = hardest.substitute(term, least if c > 0 else greatest)
        worst.append(hardest)
    return worst


def together(atom: Affine, context: Context) -> Affine:
    """An atom with all row-dependent parts in one term, if they move in both directions.

    The extremes of ``q_idx + offset[q_idx]`` are tighter bounds than the sums of extremes.
    """
    moving = context.moving(atom)
    if len(moving) < 2 or all(context.direction(term) is not None for term, _ in moving):
        return atom
    for term, _ in moving:
        atom = atom.without(term)
    return atom + symbol(sympy.Add(*(c * term for term, c in moving)))


def _is_defined_by_axioms(term: Any, variables: list[Any]) -> bool:
    """Whether axioms alone define a term: a quotient, by a number, of other variables."""
    if not (isinstance(term, FloorDiv) and term.args[1].is_Integer):
        return False
    numerator = linearise(term.args[0])
    return numerator is not None and all(
        other in variables or not other.free_symbols & variables[0].free_symbols
        for other, _ in numerator.terms
    )


def _divided(atom: Affine, term: Any, moving: set[Any]) -> Affine:
    """A bound on ``term`` by scalars alone, divided by its factor and rounded."""
    c, rest = atom.coefficient(term), atom.without(term)
    if abs(c) < 2 or any(other in moving for other, _ in rest.terms):
        return atom
    divide = ceil_div if c > 0 else floor_div
    bound = linearise(divide(rest.to_sympy() * (-1 if c > 0 else 1), sympy.Integer(abs(c))))
    assert bound is not None
    return symbol(term) - bound if c > 0 else bound - symbol(term)


def _cheapest(system: list[Affine], variables: list[Any]) -> Any:
    """The variable whose elimination leaves the fewest inequalities."""
    return min(variables, key=lambda term: (_pairs(system, term), str(term)))


def _pairs(system: list[Affine], term: Any) -> int:
    """How many inequalities the elimination of a variable makes."""
    signs = [c > 0 for atom in system if (c := atom.coefficient(term))]
    return signs.count(True) * signs.count(False)


def _loosened(atom: Affine, term: Any, context: Context) -> Affine:
    """An atom that holds wherever this one does, without the term."""
    c = atom.coefficient(term)
    least, greatest = context.extremes(term)
    return atom.substitute(term, greatest if c > 0 else least) if c else atom


def _irredundant(system: list[Affine]) -> list[Affine]:
    """The system without atoms that always hold, or that a stronger one makes redundant."""
    least: dict[Any, int] = {}
    for atom in system:
        if atom.terms or atom.const < 0:
            least[atom.terms] = min(atom.const, least.get(atom.terms, atom.const))
    return [Affine(terms, const) for terms, const in least.items()]
