"""Comparisons as systems of affine inequalities in which the solved position stands alone.

A comparison is ``e >= 0`` for some integer expression e. Its parts that are not affine are

- a minimum, a maximum, an absolute value or a choice: split into cases;
- a quotient of the solved position: ``n // d >= r`` is ``n >= d * r``, ``n // d <= r`` is
  ``n <= d * r + d - 1``;
- any expression without the solved position: a term of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, summands, symbol
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.logic import Conjunction, distribute, negation_normal_form
from flashgen.symbolic.quotients import floor_div, without_remainders
from flashgen.symbolic.trace import Orientation
from flashgen.symbols import FloorDiv
from flashgen.tracing.indicators import indicator

#: A comparison with more choices than this is not split into cases.
MAX_CHOICES = 5

#: The nodes that are split into cases.
_CHOICES = (sympy.Min, sympy.Max, sympy.Abs, sympy.Piecewise)


@dataclass(frozen=True)
class Reader:
    """Reads comparisons for one `Orientation`, given the declarations.

    Attributes:
        ranges: the first key and the end of those that a condition on keys alone may show.
        sources: for each inequality read so far, the first comparison that it came from.
    """

    orientation: Orientation
    declarations: Declarations
    ranges: Mapping[Any, tuple[Any, ...]] = field(default_factory=dict)
    sources: dict[Affine, Any] = field(default_factory=dict)

    def __call__(self, relation: Any) -> list[Conjunction]:
        """The ways to satisfy a comparison: ``a > b`` is ``a - b - 1 >= 0``, ``a != b`` two."""
        if relation in self.ranges:
            within = of_range(self.ranges[relation], self.orientation)
            self.sources.update(dict.fromkeys(within, relation))
            return [Conjunction(within, (relation,))]
        difference = without_remainders(relation.lhs) - without_remainders(relation.rhs)
        if not difference.is_integer:
            return [self._unread(relation)]
        if len(difference.atoms(*_CHOICES)) > MAX_CHOICES:
            return [Conjunction(opaque=(relation,))]
        below, above = difference - 1, -difference - 1
        cases = {
            sympy.Ge: [[difference]],
            sympy.Gt: [[below]],
            sympy.Le: [[-difference]],
            sympy.Lt: [[above]],
            sympy.Eq: [[difference, -difference]],
            sympy.Ne: [[below], [above]],
        }[relation.func]
        ways = []
        for case in cases:
            systems = [Conjunction()]
            for expr in case:
                systems = [s & part for s in systems for part in self._nonnegative(expr, relation)]
            ways += systems
        if any(way.opaque for way in ways):
            common = set(ways[0].atoms).intersection(*(way.atoms for way in ways))
            kept = tuple(atom for atom in ways[0].atoms if atom in common)
            ways = [Conjunction(kept, (relation,))]
        for atom in (atom for way in ways for atom in way.atoms):
            self.sources.setdefault(atom, relation)
        return ways

    def _unread(self, relation: Any) -> Conjunction:
        """A comparison as a whole: opaque, or a term of 0 or 1 if it is the same everywhere."""
        if self.orientation.holds_solved(relation) or self.orientation.holds_tile(relation):
            return Conjunction(opaque=(relation,))
        if isinstance(relation, sympy.Gt | sympy.Lt | sympy.Ne):
            return Conjunction((Affine.of({indicator(sympy.Not(relation)): -1}, 0),))
        return Conjunction((Affine.of({indicator(relation): 1}, -1),))

    def _nonnegative(self, expr: Any, relation: Any) -> list[Conjunction]:
        """The ways to satisfy ``expr >= 0``, a part of the relation."""
        parts = self._parts(expr)
        by_cases = [x for x in parts if isinstance(x, _CHOICES) and self._splits(x, parts[x])]
        if by_cases:
            choice = max(by_cases, key=lambda x: (x.count_ops(), str(x)))
            factor = parts.pop(choice)
            rest = sympy.Add(*(x * c for x, c in parts.items()))
            return self._by_cases(choice, factor, rest, relation)
        solved = [x for x in parts if self.orientation.holds_solved(x)]
        if not solved:
            return self._system(parts, relation)
        if len(solved) > 1:
            return [Conjunction(opaque=(relation,))]
        (x,) = solved
        factor = parts.pop(x)
        rest = sympy.Add(*(x * c for x, c in parts.items()))
        if x == self.orientation.solved and factor in (1, -1):
            return self._system({**parts, x: factor}, relation)
        positive = self.declarations.at_least(factor, 1)
        if not (positive or self.declarations.at_least(-factor, 1)):
            return [Conjunction(opaque=(relation,))]
        # c * x + r >= 0 is x + r // c >= 0, and -c * x + r >= 0 is -x + r // c >= 0.
        rest = floor_div(rest, factor if positive else -factor)
        if x == self.orientation.solved:
            return self._nonnegative(x * (1 if positive else -1) + rest, relation)
        if isinstance(x, FloorDiv) and self._is_divisor(x.args[1]):
            n, d = x.args
            inverted = n + d * rest if positive else d * rest + d - 1 - n
            return self._nonnegative(inverted, relation)
        return [Conjunction(opaque=(relation,))]

    def _parts(self, expr: Any) -> dict[Any, Any]:
        """The factor of each product that depends on a position; the factor of 1 is the rest."""
        parts: dict[Any, Any] = {}
        positions = {self.orientation.tile, self.orientation.solved}
        for part in summands(expr):
            factors = sympy.Mul.make_args(part)
            x = sympy.Mul(*(arg for arg in factors if arg.free_symbols & positions))
            fixed = sympy.Mul(*(arg for arg in factors if not arg.free_symbols & positions))
            parts[x] = parts.get(x, 0) + fixed
        return {x: factor for x, factor in parts.items() if factor != 0}

    def _is_divisor(self, divisor: Any) -> bool:
        """Whether a divisor is positive and the same for every row and key."""
        fixed = not (self.orientation.holds_tile(divisor) or self.orientation.holds_solved(divisor))
        return fixed and self.declarations.at_least(divisor, 1)

    def _splits(self, choice: Any, factor: Any) -> bool:
        """Whether ``factor * choice`` is split into cases; otherwise it is a term.

        A choice with the solved position has to be split. A choice of rows alone is split if it is
        not monotonic in the row, or if all cases have to hold and are affine.
        """
        if isinstance(choice, sympy.Piecewise):
            return True
        sign = self.declarations.sign(factor)
        if sign is None or self.orientation.holds_solved(choice):
            return sign is not None
        if self.declarations.direction(choice, self.orientation.tile) is None:
            return True
        affine = all(
            x in (self.orientation.tile, 1) for arg in choice.args for x in self._parts(arg)
        )
        return affine and _all_hold(choice, sign)

    def _by_cases(self, choice: Any, factor: Any, rest: Any, relation: Any) -> list[Conjunction]:
        """The ways to satisfy ``rest + factor * choice >= 0``."""
        if isinstance(choice, sympy.Piecewise):
            ways = []
            otherwise = sympy.true
            for value, when in choice.args:
                conditions = distribute(negation_normal_form(otherwise & when), self)
                values = self._nonnegative(rest + factor * value, relation)
                ways += [a & b for a in conditions for b in values]
                otherwise = otherwise & sympy.Not(when)
            return ways
        x = choice.args[0]
        options = (x, -x) if isinstance(choice, sympy.Abs) else choice.args
        cases = [self._nonnegative(rest + factor * option, relation) for option in options]
        if not _all_hold(choice, self.declarations.sign(factor)):
            return [way for case in cases for way in case]
        ways = [Conjunction()]
        for case in cases:
            ways = [a & b for a in ways for b in case]
        return ways

    def _system(self, parts: dict[Any, Any], relation: Any) -> list[Conjunction]:
        """One inequality, affine in the solved position and in terms of the rows."""
        coefficients: dict[Any, int] = {}
        const = 0
        for x, factor in parts.items():
            for part in summands(sympy.sympify(factor)):
                number, term = (part * x).as_coeff_Mul()
                if not number.is_Integer:
                    return [self._unread(relation)]
                if term == 1:
                    const += int(number)
                else:
                    coefficients[term] = coefficients.get(term, 0) + int(number)
        return [Conjunction((Affine.of(coefficients, const).tightened(),))]


def of_range(ends: tuple[Any, ...], orientation: Orientation) -> tuple[Affine, Affine]:
    """The solved position is at or after the first end and before the second."""
    begin, end = map(symbol, ends[:2])
    position = symbol(orientation.solved)
    return position - begin, end - position - 1


def _all_hold(choice: Any, sign: int | None) -> bool:
    """Whether ``r + c * choice >= 0`` demands all of its cases, for a c of that sign; else any."""
    return isinstance(choice, sympy.Min) == (sign == 1)
