"""octet_source: a condition as bits, of which one comparison settles those of many columns.

Columns of a tile come in octets, and a thread of Hopper's matrix units holds the same two of each.
What is said of column 8 * i + j is bit i of a number for j. Such numbers are printed here, of the
first octet's columns: kernels have `_at_least` and `_below` for what a comparison gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.symbolic.places import Place, is_integral
from flashgen.symbolic.printer.functions import without_conditional
from flashgen.symbolic.printer.text import closed
from flashgen.symbols import KV_IDX, Q_IDX

#: What tells the columns of a tile apart.
POSITIONS = {Place.ROW: Q_IDX, Place.COLUMN: KV_IDX}

NOTHING: Mapping[Any, str] = {}


def octet_source(
    condition: Any,
    along: Place,
    place: Callable[[Any], Place],
    write: Callable[[Any], str],
    known: Mapping[Any, str] = NOTHING,
) -> str:
    """Triton source for the bits of a condition; ``""`` where they are not had at less cost.

    They are where it consists, by And, Or and Not, of comparisons of a column's position with what
    all columns share, and of conditions that they share. Sides of comparisons stay as they are, so
    that none overflows which did not.

    Args:
        condition: over positions, parameters and names.
        along: what the columns of a tile are of: `Place.ROW` for queries, `Place.COLUMN` for keys.
        place: where an expression is computed.
        write: its text.
        known: of comparisons whose bits are at hand, the text of these.
    """
    if condition in known:
        return known[condition]
    if isinstance(condition, sympy.ITE):
        condition = without_conditional(condition)
    if not place(condition) & along:
        return f"tl.where({write(condition)}, -1, 0)"
    if isinstance(condition, sympy.Not):
        inner = octet_source(condition.args[0], along, place, write, known)
        return f"~{closed(inner)}" if inner else ""
    if isinstance(condition, sympy.And | sympy.Or):
        joint = " & " if isinstance(condition, sympy.And) else " | "
        parts = sorted(condition.args, key=lambda part: (part.count_ops(), str(part)))
        texts = [octet_source(part, along, place, write, known) for part in parts]
        return joint.join(map(closed, texts)) if all(texts) else ""
    return _comparison(condition, along, place, write)


def _comparison(
    condition: Any, along: Place, place: Callable[[Any], Place], write: Callable[[Any], str]
) -> str:
    """A column against what all of them share, whichever way it is written."""
    if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
        return ""
    greater, less = condition.gts, condition.lts
    strict = int(isinstance(condition, sympy.Gt | sympy.Lt))
    if not (is_integral(greater) and is_integral(less)):
        return ""
    if _is_position(greater, along, place) and not place(less) & along:
        function, column, other = "_at_least", greater - strict, less
    elif _is_position(less, along, place) and not place(greater) & along:
        function, column, other = "_below", less - (1 - strict), greater
    else:
        return ""
    return f"{function}({write(column)}, {write(other)})"


def _is_position(expr: Any, along: Place, place: Callable[[Any], Place]) -> bool:
    """Whether an expression is a column's position, or a number of the program away from it."""
    position = POSITIONS[along]
    terms = sympy.Add.make_args(expr)
    rest = [term for term in terms if term != position]
    return len(rest) == len(terms) - 1 and not any(map(place, rest))
