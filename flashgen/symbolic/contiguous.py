"""Proof that the keys that the rows of a tile see form one run without gaps.

A row sees the keys between its lower bounds, L, and its upper bounds, U. If no bound falls as the
row moves down, and ``L(row + 1) <= U(row) + 1`` in the whole tile, then the last row with
``L(row) <= k`` sees the key k, for every k between L(first) and U(last): the next row begins after
k, so that k <= U(row). The mirrored argument holds if no bound rises. The proof allows rows that
see no key.

Conditions on the row alone may exclude rows at either end of the tile. The other rows are a tile as
well, with the same ends as the whole tile if every excluded row has the bounds of the row next to
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.context import NEXT, Context
from flashgen.symbolic.entailment import Facts
from flashgen.symbolic.intervals import at_least
from flashgen.symbolic.projection import together
from flashgen.symbols import Load


def seen_without_gaps(atoms: Iterable[Affine], context: Context) -> bool:
    """Whether some row of the tile sees each key between the least and the greatest visible key.

    False means "not proved". The atoms hold the solved position with a factor of 1 or -1.
    """
    lower: list[Affine] = []
    upper: list[Affine] = []
    conditions: list[Affine] = []
    for atom in atoms:
        c, rest = (
            atom.coefficient(context.orientation.solved),
            atom.without(context.orientation.solved),
        )
        if c and context.moving(rest):
            (lower if c > 0 else upper).append(rest * -c)
        elif context.moving(rest) and not context.row.proves(rest):
            conditions.append(rest)
    bounds = lower + upper
    if len(bounds + conditions) == 1:
        (only,) = bounds + conditions
        if len(context.moving(together(only, context))) == 1:
            return True  # its extreme over the rows is the value of some row
    directions = {_direction(bound, context) for bound in bounds}
    if directions not in (set(), {1}, {-1}):
        return False
    if not _leave_a_tile(conditions, bounds, context):
        return False
    facts = _two_rows(bounds, conditions, context)
    here, after = (upper, lower) if directions == {1} else (lower, upper)
    sign = 1 if directions == {1} else -1
    return facts.proves_all((a - _next_row(b, context)) * sign + 1 for a in here for b in after)


def _leave_a_tile(conditions: list[Affine], bounds: list[Affine], context: Context) -> bool:
    """Whether the rows that meet the conditions are a tile with the ends of the whole tile.

    `projection` finds exactly which rows meet conditions on the row itself, and whether the last
    (or the first) row meets conditions that only later (or earlier) rows meet.
    """
    row = context.orientation.tile
    simple = all(context.moving(c) in ([(row, 1)], [(row, -1)]) for c in conditions)
    one_way = {_direction(condition, context) for condition in conditions} in (set(), {1}, {-1})
    return (simple or one_way) and all(
        _rows_left_out_change_nothing(condition, bounds, simple, context)
        for condition in conditions
    )


def _rows_left_out_change_nothing(
    condition: Affine, bounds: list[Affine], simple: bool, context: Context
) -> bool:
    """Whether rows that break a condition have the bounds of the row next to them.

    `projection` handles a bound that is the row itself, if the conditions are `simple`.
    """
    row = context.orientation.tile
    out = condition if _direction(condition, context) == 1 else _next_row(condition, context)
    facts = Facts((*_next(context), out.negated()), context.axioms)
    return all(
        simple
        if term == row
        else _same(context.at(term, row).to_sympy(), context.at(term, NEXT).to_sympy(), facts)
        for bound in bounds
        for term, _ in context.moving(bound)
    )


def _same(a: Any, b: Any, facts: Facts) -> bool:
    """Whether the facts prove ``a == b``, or that all their parts are equal."""
    if a == b or (at_least(a, b, facts) and at_least(b, a, facts)):
        return True
    alike = a.func == b.func and 0 < len(a.args) == len(b.args)
    return alike and all(_same(x, y, facts) for x, y in zip(a.args, b.args, strict=True))


def _next(context: Context) -> tuple[Affine, ...]:
    """The facts about a row of the tile and the next row."""
    row, after = symbol(context.orientation.tile), symbol(NEXT)
    inside = symbol(context.orientation.last) - after
    return (*context.row.atoms, after - row - 1, row + 1 - after, inside)


def _two_rows(bounds: list[Affine], conditions: Iterable[Affine], context: Context) -> Facts:
    """The facts about a row that meets the conditions, and a next row that meets them too."""
    facts = list(_next(context))
    for condition in conditions:
        facts += [condition, _next_row(condition, context)]
    terms = [term for bound in bounds for term, _ in context.moving(bound)]
    indices = [linearise(term.args[-1]) for term in terms if isinstance(term, Load)]
    terms += [term for index in indices if index is not None for term, _ in context.moving(index)]
    for term in dict.fromkeys(terms):
        direction = context.direction(term)
        if direction is None or term == context.orientation.tile:
            continue
        moved = (_next_row(symbol(term), context) - symbol(term)) * direction
        facts.append(moved)
        step = context.declarations.step(term, context.orientation.tile)
        if step is not None and (most := linearise(step)) is not None:
            facts.append(most - moved)
    return Facts(tuple(facts), context.axioms_of_seen)


def _next_row(atom: Affine, context: Context) -> Affine:
    """An atom at the next row."""
    for term, c in context.moving(atom):
        moved = linearise(term.xreplace({context.orientation.tile: NEXT}))
        assert moved is not None, term
        atom = atom.without(term) + moved * c
    return atom


def _direction(bound: Affine, context: Context) -> int | None:
    """The direction in which a bound moves with the row; None if unknown."""
    moves: set[int | None] = set()
    for term, c in context.moving(bound):
        direction = context.direction(term)
        moves.add(direction if direction is None or c > 0 else -direction)
    return moves.pop() if len(moves) == 1 else None
