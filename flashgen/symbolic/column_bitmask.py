"""column_bitmask: a condition as bits, so that one comparison decides for many columns.

A thread holds the same two of every eight columns of a tile in the layout of Hopper's matrix units.
The condition at column 8 * i + j is bit i of number j, so eight numbers, the column bitmask, hold a
row of 256 columns. This module makes them from conditions on the first eight columns: kernels have
`_at_least` and `_below` for the bits of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from flashgen.symbolic.nodes import AsBits, AtLeast, Below, BothBits, EitherBits, OtherBits
from flashgen.symbolic.printer.functions import without_conditional
from flashgen.symbolic.varies_over import Axes, is_integral
from flashgen.symbols import KV_IDX, Q_IDX

#: The positions that distinguish the columns of a tile.
POSITIONS = {Axes.ROW: Q_IDX, Axes.COLUMN: KV_IDX}

NOTHING: Mapping[Any, Any] = {}


def column_bitmask(
    condition: Any,
    along: Axes,
    varies_over: Callable[[Any], Axes],
    known: Mapping[Any, Any] = NOTHING,
    own: Callable[[Any], Any] | None = None,
) -> Any:
    """The bits of a condition; None if they would cost as much as the condition.

    A condition has bits if it combines, by And, Or and Not, comparisons of a column's position with
    a value that all columns share, conditions that all columns share, and such that the lanes of a
    warp can share: of each column alone. Sides of comparisons stay unchanged, so that no new
    overflow is possible.

    Args:
        condition: over positions, parameters and names.
        along: what the columns of a tile are: `Axes.ROW` for queries, `Axes.COLUMN` for keys.
        varies_over: what an expression varies over.
        known: the bits of comparisons that have been computed already.
        own: names the bits of a condition of each column alone; None: it has none, unless it is a
            comparison of positions.
    """
    if condition in known:
        return known[condition]
    if isinstance(condition, sympy.ITE):
        condition = without_conditional(condition)
    if not varies_over(condition) & along:
        return AsBits(condition)
    if own is not None and varies_over(condition) == along:
        found = column_bitmask(condition, along, varies_over, known)
        return own(condition) if found is None else found
    if isinstance(condition, sympy.Not):
        inner = column_bitmask(condition.args[0], along, varies_over, known, own)
        return None if inner is None else OtherBits(inner)
    if isinstance(condition, sympy.And | sympy.Or):
        joint = BothBits if isinstance(condition, sympy.And) else EitherBits
        parts = sorted(condition.args, key=lambda part: (part.count_ops(), str(part)))
        bits = [column_bitmask(part, along, varies_over, known, own) for part in parts]
        return None if None in bits else joint(*bits)
    if (sides := _between(condition, along)) is not None:
        return column_bitmask(sides, along, varies_over, known, own)
    return _comparison(condition, along, varies_over)


def _between(condition: Any, along: Axes) -> Any:
    """That a number is between two others, for a comparison of its absolute value; else None."""
    relations = sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt
    if not isinstance(condition, relations) or not isinstance(condition.lts, sympy.Abs):
        return None
    [inside] = condition.lts.args
    if inside.coeff(POSITIONS[along]) < 0:
        inside = -inside
    below = sympy.Lt if isinstance(condition, sympy.Gt | sympy.Lt) else sympy.Le
    return sympy.And(below(inside, condition.gts), below(-condition.gts, inside))


def _comparison(condition: Any, along: Axes, varies_over: Callable[[Any], Axes]) -> Any:
    """The bits of a comparison of a column with a value that all columns share, in any order."""
    if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
        return None
    greater, less = condition.gts, condition.lts
    strict = int(isinstance(condition, sympy.Gt | sympy.Lt))
    if not (is_integral(greater) and is_integral(less)):
        return None
    if _is_position(greater, along, varies_over) and not varies_over(less) & along:
        return AtLeast(greater - strict, less)
    if _is_position(less, along, varies_over) and not varies_over(greater) & along:
        return Below(less - (1 - strict), greater)
    return None


def _is_position(expr: Any, along: Axes, varies_over: Callable[[Any], Axes]) -> bool:
    """Whether an expression is a column's position, or how far a row is from it, plus a scalar."""
    position = POSITIONS[along]
    [other] = {*POSITIONS.values()} - {position}
    terms = sympy.Add.make_args(expr)
    rest = [term for term in terms if term not in (position, -other)]
    return position in terms and not any(map(varies_over, rest))
