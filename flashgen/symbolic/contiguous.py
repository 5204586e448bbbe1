"""Proof that the keys which the rows of a tile see make one run without gaps.

A row sees the keys between its lower bounds, L, and its upper bounds, U. If none of these falls as
the row moves down, and ``L(row + 1) <= U(row) + 1`` in the whole tile, then every key k between
L(first) and U(last) is seen by the last row with ``L(row) <= k``: the next one begins after k, so
that k <= U(row). The same holds upside down where none rises. Rows that see nothing do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.context import NEXT, Context
from flashgen.symbolic.facts import Facts
from flashgen.symbolic.projection import together
from flashgen.symbols import Load


def seen_without_gaps(atoms: Sequence[Affine], context: Context) -> bool:
    """Whether some row of the tile sees each key between the least and the greatest that are seen.

    False means "not proved". The atoms hold the solved position with a factor of 1 or -1.
    """
    lower: list[Affine] = []
    upper: list[Affine] = []
    conditions: list[Affine] = []
    ranges = context.ranges(atoms)
    for atom in atoms:
        c, rest = atom.coefficient(context.roles.solved), atom.without(context.roles.solved)
        if c and context.moving(rest):
            (lower if c > 0 else upper).append(rest * -c)
        elif context.moving(rest) and not (rest in ranges or context.row.proves(rest)):
            conditions.append(rest)
    bounds = lower + upper
    if ranges and not all(_keeps_to_its_tensor(bound, context) for bound in bounds):
        return False
    if len(bounds + conditions) == 1:
        (only,) = bounds + conditions
        if len(context.moving(together(only, context))) == 1:
            return True  # its extreme over the rows is what one of them has
    if conditions:
        return False
    directions = {_direction(bound, context) for bound in bounds}
    if directions not in (set(), {1}, {-1}):
        return False
    facts = _two_rows(bounds, ranges, context)
    here, after = (upper, lower) if directions == {1} else (lower, upper)
    sign = 1 if directions == {1} else -1
    return facts.proves_all((a - _next_row(b, context)) * sign + 1 for a in here for b in after)


def _two_rows(bounds: list[Affine], conditions: Iterable[Affine], context: Context) -> Facts:
    """What is known of a row that meets the conditions and of the next, which meets them too."""
    row, after = symbol(context.roles.tile), symbol(NEXT)
    facts = [*context.row.atoms, after - row - 1, row + 1 - after]
    facts.append(symbol(context.roles.last) - after)
    for condition in conditions:
        facts += [condition, _next_row(condition, context)]
    for term in {term: None for bound in bounds for term, _ in context.moving(bound)}:
        direction = context.direction(term)
        if direction is None or term == context.roles.tile:
            continue
        moved = (_next_row(symbol(term), context) - symbol(term)) * direction
        facts.append(moved)
        step = context.known.step(term, context.roles.tile)
        if step is not None and (most := linearise(step)) is not None:
            facts.append(most - moved)
    return Facts(tuple(facts), context.links_of_seen)


def _keeps_to_its_tensor(bound: Affine, context: Context) -> bool:
    """Whether a bound at the ends of a tile, with indices clamped, is that of the first or last
    row whose indices lie inside: it is made of the row and of elements one for each row.
    """
    return all(
        term == context.roles.tile
        or (isinstance(term, Load) and context.known.step(term.args[-1], context.roles.tile) == 1)
        for term, _ in context.moving(bound)
    )


def _next_row(atom: Affine, context: Context) -> Affine:
    """An atom at the next row."""
    for term, c in context.moving(atom):
        moved = linearise(term.xreplace({context.roles.tile: NEXT}))
        assert moved is not None, term
        atom = atom.without(term) + moved * c
    return atom


def _direction(bound: Affine, context: Context) -> int | None:
    """Which way a bound moves with the row; None where that is not known."""
    moves: set[int | None] = set()
    for term, c in context.moving(bound):
        direction = context.direction(term)
        moves.add(direction if direction is None or c > 0 else -direction)
    return moves.pop() if len(moves) == 1 else None
