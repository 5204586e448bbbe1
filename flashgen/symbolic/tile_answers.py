"""A mask on tiles, by the least and the greatest value of what it reads of a tile's rows and keys.

`tile_logic` needs expressions that are monotonic in both positions. Here a kernel looks at the
tensors, so that anything may depend on one of the two positions:

- an integer of the rows alone, or of the keys alone, has its least and its greatest value in the
  tile; a sum, quotient, minimum or absolute value of such integers lies between bounds;
- a condition on the rows alone, or on the keys alone, holds for some and for all of them;
- a block of `TILE` rows or keys, or of a multiple, has one number in the tile: ``kv_idx // 128``;
- anything else is unknown, and floats are: their bounds would hide a NaN.

The answers are conservative: a tile with a visible element is always seen, and a tile with a hidden
element is never full. Two more say where that is all there is to know: a tile that is shown has a
visible element, and a tile that is not whole has a hidden one. Where these leave a tile open, its
elements decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from flashgen.symbolic.affine import summands
from flashgen.symbolic.cases import cases_of
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.key_ranges import holds_range
from flashgen.symbolic.logic import negation_normal_form
from flashgen.symbolic.tile_logic import compared
from flashgen.symbolic.trace import KEYS_OF_ROWS, POSITIONS, ROWS_OF_KEYS, Predicate
from flashgen.symbolic.varies_over import Axes, is_integral, varies_over
from flashgen.symbols import (
    KV_FIRST,
    KV_IDX,
    KV_LAST,
    Q_FIRST,
    Q_IDX,
    Q_LAST,
    FloorDiv,
    FloorMod,
    Load,
)

#: The rows and keys of a tile that is decided: tiles of all kernels consist of such tiles.
TILE = 64

_ENDS = {Q_IDX: (Q_FIRST, Q_LAST), KV_IDX: (KV_FIRST, KV_LAST)}
_FIRST = {position: first for position, (first, _) in _ENDS.items()}

#: The least and the greatest value of an integer; or whether a condition holds for some, for all.
Pair = tuple[Any, Any]

#: seen, full, shown and whole: see `TileAnswers`.
Answer = tuple[Any, Any, Any, Any]

#: Conditions on both positions of a conjunction or disjunction of which shown and whole are asked.
_MOST_MIXED = 4


@dataclass(frozen=True)
class OfTile:
    """What is computed of a tile's rows alone, or of its keys alone.

    Attributes:
        expr: an integer or a condition, in terms of q_idx or kv_idx.
        over: the axis that it varies over.
        ends: symbols: its least and its greatest value; of a condition, whether it holds for some
            and for all of them.
    """

    expr: Any
    over: Axes
    ends: Pair

    @property
    def is_condition(self) -> bool:
        """Whether it is a condition."""
        return isinstance(self.expr, Boolean)


@dataclass(frozen=True)
class TileAnswers:
    """The mask on the tile of rows q_first..q_last and keys kv_first..kv_last.

    Attributes:
        seen: sympy Boolean: some element may be visible. If false, no element is.
        full: sympy Boolean: every element is visible. If false, some may be hidden.
        shown: sympy Boolean: some element is visible. If false, none may be.
        whole: sympy Boolean: every element may be visible. If false, some element is hidden.
        reads: what they read of rows and of keys.
    """

    seen: Any
    full: Any
    shown: Any
    whole: Any
    reads: tuple[OfTile, ...]


@lru_cache(maxsize=1024)  # a build asks for the same ones at several steps, of every spec
def left_to_data(predicate: Predicate, *, ranges: bool = False) -> tuple[Any, ...]:
    """The conditions on elements of tensors that bounds of tiles leave out, in any order.

    With ``ranges``, a condition on keys alone that all visible elements meet, as that of padding,
    is none of them: see `derive_bounds`. What shows some keys besides others, as a flag of global
    tokens does, lies anywhere between the first and the last of them.
    """
    found: dict[Any, None] = {}
    for orientation in (KEYS_OF_ROWS, ROWS_OF_KEYS):
        context, cases = cases_of(predicate, orientation, ranges=ranges)
        met_by_all = set.intersection(*(set(case.opaque) for case in cases)) if cases else set()
        for case in cases:
            solved = {part for part in met_by_all if holds_range(case.atoms, part, context)}
            left = (part for part in case.opaque if part not in solved)
            found |= dict.fromkeys(part for part in left if _reads_positions(part))
    return tuple(found)


def _reads_positions(part: Any) -> bool:
    return any(POSITIONS & element.free_symbols for element in part.atoms(Load))


def tile_answers(predicate: Predicate, tile: int = TILE) -> TileAnswers:
    """A predicate on whole tiles of so many rows and keys, which begin at multiples of that."""
    expr = negation_normal_form(predicate.expr)
    blocks = {
        block: block.xreplace(_FIRST)
        for block in expr.atoms(FloorDiv)
        if block.args[0] in _FIRST and block.args[1].is_Integer and block.args[1] % tile == 0
    }
    found = _Answers(Declarations.of(predicate.params))
    answers = found.condition(_with_equals(expr).xreplace(blocks))
    read = set().union(*(answer.free_symbols for answer in answers))
    reads = (of_tile for of_tile in found.reads.values() if read & set(of_tile.ends))
    return TileAnswers(*answers, tuple(reads))


@dataclass
class _Answers:
    """Answers, and what they read of rows and keys so far."""

    declarations: Declarations
    reads: dict[Any, OfTile] = field(default_factory=dict)

    def condition(self, expr: Any) -> Answer:
        """What is known of a condition on the elements of the tile."""
        over = varies_over(expr)
        if over == Axes.SCALAR:
            return expr, expr, expr, expr
        if over != Axes.ELEMENT:
            return self._named(expr, over) * 2
        if isinstance(expr, sympy.And | sympy.Or):
            return self._joined(expr)
        if isinstance(expr, Relational) and is_integral(expr.lhs) and is_integral(expr.rhs):
            terms = list(summands(expr.lhs - expr.rhs))
            ends = self._sum(terms)
            if ends is not None:
                found = compared(expr.func, *ends)
                # A row and a key with the extremes of both are an element of the tile.
                exact = Axes.ELEMENT not in map(varies_over, terms)
                known = found if exact and expr.func in _ORDERS else (sympy.false, sympy.true)
                return (*found, *known)
        return sympy.true, sympy.false, sympy.false, sympy.true

    def _joined(self, expr: Any) -> Answer:
        """What is known of a conjunction or disjunction."""
        groups = _by_axes(expr)
        answers = [self.condition(group) for group in groups]
        seen, full, shown, whole = (expr.func(*each) for each in zip(*answers, strict=True))
        # What holds for some row and what holds for some key hold for one element; of two other
        # conditions that some elements meet, one has to hold for all.
        axes = [varies_over(group) for group in groups]
        apart = [a for a, over in zip(answers, axes, strict=True) if over != Axes.ELEMENT]
        units = [a for a, over in zip(answers, axes, strict=True) if over == Axes.ELEMENT]
        if len(apart) > len({over for over in axes if over != Axes.ELEMENT}):
            units += apart
        elif apart:
            units.append(tuple(expr.func(*each) for each in zip(*apart, strict=True)))
        few = len(units) <= _MOST_MIXED
        if isinstance(expr, sympy.And):
            shown = sympy.Or(*_with_others(sympy.And, units, 2, 1)) if few else sympy.false
        else:
            whole = sympy.And(*_with_others(sympy.Or, units, 3, 0)) if few else sympy.true
        return seen, full, shown, whole

    def _named(self, expr: Any, over: Axes) -> Pair:
        """Symbols for an expression of one axis."""
        if expr not in self.reads:
            holds = isinstance(expr, Boolean)
            of = "rows" if over == Axes.ROW else "keys"
            number = sum(read.over == over for read in self.reads.values())
            kinds = ("some", "every") if holds else ("least", "most")
            names = [f"{kind}_of_{of}_{number}" for kind in kinds]
            known = {} if holds else {"integer": True}
            ends = tuple(sympy.Symbol(name, **known) for name in names)
            self.reads[expr] = OfTile(expr, over, (ends[0], ends[1]))
        return self.reads[expr].ends

    def _ends(self, expr: Any) -> Pair | None:
        """Bounds on an integer in the tile; None where nothing is known."""
        over = varies_over(expr)
        if over == Axes.SCALAR:
            return expr, expr
        if any(map(self.declarations.is_condition, (x.args[0] for x in expr.atoms(Load)))):
            return None
        if over != Axes.ELEMENT:
            return self._of_one_axis(expr, over)
        if expr.is_Add:
            return self._sum(expr.args)
        rule = _RULES.get(expr.func)
        return None if rule is None else rule(self, expr)

    def _of_one_axis(self, expr: Any, over: Axes) -> Pair:
        """The least and the greatest value of an integer of rows alone, or of keys alone."""
        if expr.could_extract_minus_sign():
            least, most = self._of_one_axis(-expr, over)
            return -most, -least
        position = Q_IDX if over == Axes.ROW else KV_IDX
        first, last = _ENDS[position]
        way = None if expr.has(Load) else self.declarations.direction(expr, position)
        if way is None:
            return self._named(expr, over)
        ends = expr.xreplace({position: first}), expr.xreplace({position: last})
        return ends if way >= 0 else (ends[1], ends[0])

    def _sum(self, terms: Iterable[Any]) -> Pair | None:
        """Bounds on a sum: terms of one axis have the extremes of their sum."""
        groups: dict[Axes, list[Any]] = {}
        for term in terms:
            groups.setdefault(varies_over(term), []).append(term)
        mixed = groups.pop(Axes.ELEMENT, [])
        ends = [self._ends(x) for x in (*(sympy.Add(*group) for group in groups.values()), *mixed)]
        known = [pair for pair in ends if pair is not None]
        if len(known) < len(ends):
            return None
        least, most = zip(*known, strict=True)
        return sympy.Add(*least), sympy.Add(*most)

    def _product(self, expr: Any) -> Pair | None:
        scalars = [x for x in expr.args if varies_over(x) == Axes.SCALAR]
        others = [x for x in expr.args if x not in scalars]
        factor = sympy.Mul(*scalars)
        sign, ends = self.declarations.sign(factor), None
        if len(others) == 1 and sign is not None:
            ends = self._ends(others[0])
        if ends is None:
            return None
        least, most = (factor * end for end in ends)
        return (least, most) if sign == 1 else (most, least)

    def _quotient(self, expr: Any) -> Pair | None:
        ends, divisor = self._divided(expr), expr.args[1]
        return None if ends is None else (FloorDiv(ends[0], divisor), FloorDiv(ends[1], divisor))

    def _remainder(self, expr: Any) -> Pair | None:
        ends, divisor = self._divided(expr), expr.args[1]
        if ends is None:
            return None
        # Where no multiple of the divisor lies between them, remainders ascend as the numbers do.
        least, most = ends
        together = sympy.Eq(FloorDiv(least, divisor), FloorDiv(most, divisor))
        return (
            sympy.Piecewise((FloorMod(least, divisor), together), (0, True)),
            sympy.Piecewise((FloorMod(most, divisor), together), (divisor - 1, True)),
        )

    def _divided(self, expr: Any) -> Pair | None:
        number, divisor = expr.args
        positive = varies_over(divisor) == Axes.SCALAR and self.declarations.at_least(divisor, 1)
        return self._ends(number) if positive else None

    def _extreme(self, expr: Any) -> Pair | None:
        ends = [self._ends(x) for x in expr.args]
        known = [pair for pair in ends if pair is not None]
        if len(known) < len(ends):
            return None
        least, most = zip(*known, strict=True)
        return expr.func(*least), expr.func(*most)

    def _absolute(self, expr: Any) -> Pair | None:
        ends = self._ends(expr.args[0])
        if ends is None:
            return None
        least, most = ends
        return sympy.Max(least, -most, 0), sympy.Max(-least, most)


def _with_equals(expr: Any) -> Any:
    """The same condition, where a conjunct on one side of an equation is asked of the other, too.

    So rows of a picture, ``(img[q_idx] == img[kv_idx]) & (img[q_idx] > 0)``, see no tile of text,
    whatever else their tile holds.
    """
    if not isinstance(expr, sympy.And | sympy.Or):
        return expr
    expr = expr.func(*map(_with_equals, expr.args))
    if not isinstance(expr, sympy.And):
        return expr
    said = {
        part.xreplace({one: other})
        for equation in expr.args
        if _equates_axes(equation)
        for one, other in (equation.args, equation.args[::-1])
        for part in expr.args
        if part.has(one) and varies_over(part) == varies_over(one)
    }
    return sympy.And(expr, *(part for part in said if varies_over(part) != Axes.ELEMENT))


def _equates_axes(part: Any) -> bool:
    """Whether it says that an integer of rows alone equals one of keys alone."""
    if not (isinstance(part, sympy.Eq) and all(map(is_integral, part.args))):
        return False
    return {varies_over(side) for side in part.args} == {Axes.ROW, Axes.COLUMN}


#: Comparisons that hold for some and for all elements where they do at the ends.
_ORDERS = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)

_RULES: dict[Any, Callable[[_Answers, Any], Pair | None]] = {
    sympy.Mul: _Answers._product,
    FloorDiv: _Answers._quotient,
    FloorMod: _Answers._remainder,
    sympy.Min: _Answers._extreme,
    sympy.Max: _Answers._extreme,
    sympy.Abs: _Answers._absolute,
}


def _with_others(join: Any, units: list[Answer], own: int, others: int) -> list[Any]:
    """For each unit one of its own answers, joined with another answer of all others."""
    return [
        join(unit[own], *(other[others] for other in units if other is not unit)) for unit in units
    ]


def _by_axes(expr: Any) -> list[Any]:
    """The parts of a conjunction or disjunction; those of one axis are one part: it is exact."""
    groups: dict[tuple[Axes, bool], list[Any]] = {}
    mixed = []
    for part in expr.args:
        over = varies_over(part)
        if over in (Axes.ROW, Axes.COLUMN):
            groups.setdefault((over, KV_FIRST in part.free_symbols), []).append(part)
        else:
            mixed.append(part)
    return [*(expr.func(*group) for group in groups.values()), *mixed]
