"""Facts for deriving bounds: about a tile, an element, and the terms of an inequality."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import sympy

from flashgen.params import Int
from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.axioms import axioms_of
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.entailment import Axioms, Facts
from flashgen.symbolic.inequalities import Reader
from flashgen.symbolic.intervals import at_least
from flashgen.symbolic.tables import Ranges, RangeTable
from flashgen.symbolic.trace import Orientation, Predicate
from flashgen.symbols import KV_LEN, Q_LEN, B, H, Load, RowMax, RowMin

#: The position after `Orientation.tile`.
NEXT = sympy.Symbol("next", integer=True)


@dataclass(frozen=True, eq=False)
class Context:
    """One derivation: a predicate, and which of its positions is solved for.

    Attributes:
        origins: the user's own comparison for each rewritten one.
        key_ranges: of conditions on the solved position alone the ends of what they show.
        range_tables: the tables that these ends are elements of.
    """

    predicate: Predicate
    orientation: Orientation
    origins: Mapping[Any, Any] = field(default_factory=dict)
    key_ranges: Ranges = field(default_factory=dict)
    range_tables: tuple[RangeTable, ...] = ()

    @cached_property
    def declarations(self) -> Declarations:
        """The declarations of the predicate's parameters."""
        return Declarations.of(self.predicate.params, self.predicate.tables, self.range_tables)

    @cached_property
    def axioms(self) -> Axioms:
        """The axioms of a compound term."""
        return axioms_of(self.declarations, self.inside)

    @cached_property
    def axioms_of_seen(self) -> Axioms:
        """Further facts where some key is visible: indices lie inside of their tensors."""
        return axioms_of(self.declarations, lambda element: True)

    @cached_property
    def read(self) -> Reader:
        """Reads comparisons."""
        return Reader(self.orientation, self.declarations, self.key_ranges)

    @cached_property
    def scalars(self) -> Facts:
        """The facts about run-time scalars."""
        return Facts(self._declared, self.axioms)

    @cached_property
    def _declared(self) -> tuple[Affine, ...]:
        """Lengths from 1 up, parameters from their min up."""
        params = [param for param in self.predicate.params if isinstance(param, Int)]
        atoms = [symbol(Q_LEN) - 1, symbol(KV_LEN) - 1, symbol(B), symbol(H)]
        atoms += [symbol(param.sym) - param.min for param in params]
        if self.predicate.equal_lengths:
            difference = symbol(Q_LEN) - symbol(KV_LEN)
            atoms += [difference, -difference]
        return tuple(atoms)

    @cached_property
    def tile(self) -> Facts:
        """The facts about a tile as a whole."""
        first, last = symbol(self.orientation.first), symbol(self.orientation.last)
        return self.scalars.given(first, last - first, symbol(self.orientation.tile_len) - 1 - last)

    @cached_property
    def row(self) -> Facts:
        """The facts about a tile and one position in it."""
        row = symbol(self.orientation.tile)
        return self.tile.given(
            row - symbol(self.orientation.first), symbol(self.orientation.last) - row
        )

    @cached_property
    def element(self) -> Facts:
        """The facts about a row and a key of the whole matrix."""
        return self.scalars.given(
            *within(self.orientation.tile, self.orientation.tile_len),
            *within(self.orientation.solved, self.orientation.solved_len),
        )

    @cached_property
    def _anywhere(self) -> Facts:
        """The facts about each named position, from declarations alone."""
        rows = (self.orientation.tile, self.orientation.first, self.orientation.last, NEXT)
        places = [*(within(row, self.orientation.tile_len) for row in rows)]
        places.append(within(self.orientation.solved, self.orientation.solved_len))
        atoms = (*self._declared, *(atom for place in places for atom in place))
        return Facts(atoms, axioms_of(self.declarations, lambda element: False))

    def hides(self, expr: Any) -> bool:
        """Whether an expression reads a row table with a hidden id."""
        return bool(self._hiding(expr))

    def _hiding(self, expr: Any) -> dict[tuple[Any, tuple[Any, ...]], None]:
        """The places at which an expression reads such tables; see `Places`."""
        tables = self.declarations.tables
        loads = [x for x in sorted(expr.atoms(Load), key=str) if x.args[0] in tables]
        found = [(tables[x.args[0]], x.args[1:]) for x in loads]
        return dict.fromkeys((table.search, at) for table, at in found if table.hidden is not None)

    def every_way(self, facts: Facts, expr: Any) -> tuple[Facts, ...]:
        """The facts for each set of places with hidden ids, among those that ``expr`` reads.

        Other proofs are about rows that see a key, which have no hidden id.
        """
        places = self._hiding(expr)
        chosen = chain(*(combinations(places, n) for n in range(1, len(places) + 1)))
        axioms = (axioms_of(self.declarations, self.inside, frozenset(hidden)) for hidden in chosen)
        return (facts, *(Facts(facts.atoms, of) for of in axioms))

    def inside(self, element: Any) -> bool:
        """Whether an element, a `Load`, is known to lie inside of its tensor."""
        sized = self.declarations.size(element.args[0]) is not None
        return sized and self._from_zero(element) and self._below_size(element)

    def inside_when(self, element: Any) -> tuple[Any, ...]:
        """The conditions on the last index of a `Load` that are not known to hold."""
        index, size = element.args[-1], self.declarations.size(element.args[0])
        below = () if self._from_zero(element) else (sympy.Ge(index, 0, evaluate=False),)
        above = () if self._below_size(element) else (sympy.Lt(index, size, evaluate=False),)
        return below + above

    def _from_zero(self, element: Any) -> bool:
        return at_least(element.args[-1], sympy.Integer(0), self._anywhere)

    def _below_size(self, element: Any) -> bool:
        size = self.declarations.size(element.args[0])
        return size is None or at_least(size - 1, element.args[-1], self._anywhere)

    def ranges(self, atoms: Iterable[Affine]) -> tuple[Affine, ...]:
        """Further conditions for a row that sees a key: indices lie inside of tensors."""
        elements = {
            element: None
            for atom in atoms
            for term, _ in self.moving(atom)
            for element in sorted(term.atoms(Load), key=str)
            if self.orientation.holds_tile(element)
        }
        needed: list[Affine] = []
        for element in elements:
            index = linearise(element.args[-1])
            if index is not None and not self._from_zero(element):
                needed.append(index)
            if index is not None and not self._below_size(element):
                size = linearise(self.declarations.size(element.args[0]))
                needed += [size - 1 - index] if size is not None else []
        return tuple(dict.fromkeys(needed))

    def direction(self, term: Any) -> int | None:
        """How a term moves with the position in the tile: see `Declarations.direction`."""
        return self.declarations.direction(term, self.orientation.tile)

    def moving(self, atom: Affine) -> list[tuple[Any, int]]:
        """The terms of an atom that differ from row to row of the tile, with their factors."""
        return [item for item in atom.terms if self.orientation.holds_tile(item[0])]

    def at(self, term: Any, position: Any) -> Affine:
        """A term at one position of the tile; an index that may lie outside is clamped.

        Outside of the tensor a kernel reads 0, which is not between the neighbouring elements.
        """
        if (term, position) not in self._placed:
            self._placed[term, position] = self._at(term, position)
        return self._placed[term, position]

    @cached_property
    def _placed(self) -> dict[tuple[Any, Any], Affine]:
        """The cache of `at`."""
        return {}

    def _at(self, term: Any, position: Any) -> Affine:
        value = term.xreplace({self.orientation.tile: position})
        for element in value.atoms(Load):
            if position in element.args[-1].free_symbols:
                *lead, index = element.args
                if not self._from_zero(element):
                    index = sympy.Max(index, 0, evaluate=False)
                size = self.declarations.size(element.args[0])
                if size is not None and not self._below_size(element):
                    index = sympy.Min(index, size - 1, evaluate=False)
                value = value.xreplace({element: Load(*lead, index)})
        affine = linearise(value)
        assert affine is not None, term
        return affine

    def extremes(self, term: Any) -> tuple[Affine, Affine]:
        """The least and the greatest value of a term over the tile."""
        direction = self.direction(term)
        if direction is None:
            return symbol(RowMin(term)), symbol(RowMax(term))
        ends = self.at(term, self.orientation.first), self.at(term, self.orientation.last)
        return ends if direction >= 0 else (ends[1], ends[0])


def within(position: Any, length: Any) -> tuple[Affine, Affine]:
    """``0 <= position < length``."""
    return symbol(position), symbol(length) - 1 - symbol(position)
