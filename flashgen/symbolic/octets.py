"""octets_of: a condition as bits, of which one comparison settles those of many columns.

Columns of a tile come in octets, and a thread of Hopper's matrix units holds the same two of each.
What is said of column 8 * i + j is bit i of a number for j. Such numbers are made here, of the
first octet's columns: kernels have `_at_least` and `_below` for what a comparison gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.symbolic.nodes import AsBits, AtLeast, Below, BothBits, EitherBits, OtherBits
from flashgen.symbolic.places import Place, is_integral
from flashgen.symbolic.printer.functions import without_conditional
from flashgen.symbols import KV_IDX, Q_IDX

#: What tells the columns of a tile apart.
POSITIONS = {Place.ROW: Q_IDX, Place.COLUMN: KV_IDX}

NOTHING: Mapping[Any, Any] = {}


def octets_of(
    condition: Any,
    along: Place,
    place: Callable[[Any], Place],
    known: Mapping[Any, Any] = NOTHING,
) -> Any:
    """The bits of a condition; None where they are not had at less cost.

    They are where it consists, by And, Or and Not, of comparisons of a column's position with what
    all columns share, and of conditions that they share. Sides of comparisons stay as they are, so
    that none overflows which did not.

    Args:
        condition: over positions, parameters and names.
        along: what the columns of a tile are of: `Place.ROW` for queries, `Place.COLUMN` for keys.
        place: where an expression is computed.
        known: of comparisons whose bits are at hand, these.
    """
    if condition in known:
        return known[condition]
    if isinstance(condition, sympy.ITE):
        condition = without_conditional(condition)
    if not place(condition) & along:
        return AsBits(condition)
    if isinstance(condition, sympy.Not):
        inner = octets_of(condition.args[0], along, place, known)
        return None if inner is None else OtherBits(inner)
    if isinstance(condition, sympy.And | sympy.Or):
        joint = BothBits if isinstance(condition, sympy.And) else EitherBits
        parts = sorted(condition.args, key=lambda part: (part.count_ops(), str(part)))
        bits = [octets_of(part, along, place, known) for part in parts]
        return None if None in bits else joint(*bits)
    return _comparison(condition, along, place)


def _comparison(condition: Any, along: Place, place: Callable[[Any], Place]) -> Any:
    """A column against what all of them share, whichever way it is written."""
    if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
        return None
    greater, less = condition.gts, condition.lts
    strict = int(isinstance(condition, sympy.Gt | sympy.Lt))
    if not (is_integral(greater) and is_integral(less)):
        return None
    if _is_position(greater, along, place) and not place(less) & along:
        return AtLeast(greater - strict, less)
    if _is_position(less, along, place) and not place(greater) & along:
        return Below(less - (1 - strict), greater)
    return None


def _is_position(expr: Any, along: Place, place: Callable[[Any], Place]) -> bool:
    """Whether an expression is a column's position, or a number of the program away from it."""
    position = POSITIONS[along]
    terms = sympy.Add.make_args(expr)
    rest = [term for term in terms if term != position]
    return len(rest) == len(terms) - 1 and not any(map(place, rest))
