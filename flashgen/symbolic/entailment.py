"""Entailment: what a system of affine inequalities proves.

Eliminating every symbol from a system decides whether it has a rational solution at all, hence
whether an inequality follows from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any

from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbols import FloorDiv

#: A proof that needs a larger system than this is given up: the answer is then "not proved".
MAX_SYSTEM = 300


def quotient_axioms(term: Any) -> tuple[Affine, ...]:
    """The axioms of a quotient ``t = a // d`` by a number: ``0 <= a - d * t <= d - 1``."""
    if not (isinstance(term, FloorDiv) and term.args[1].is_Integer):
        return ()
    numerator, divisor = linearise(term.args[0]), int(term.args[1])
    if numerator is None:
        return ()
    remainder = numerator - symbol(term) * divisor
    return remainder, -remainder + (divisor - 1)


#: The axioms of a compound term, as inequalities with other terms.
Axioms = Callable[[Any], tuple[Affine, ...]]


def infeasible(system: Iterable[Affine], axioms: Axioms = quotient_axioms) -> bool:
    """Whether no rational point satisfies the system. False also means "given up".

    It eliminates every term. Terms are numbered, because deriving bounds spends its time here.
    """
    numbers: dict[Any, int] = {}
    rows: _Rows = {}
    for atom in with_axioms(system, axioms):
        row = sorted([(numbers.setdefault(term, len(numbers)), c) for term, c in atom.terms])
        if not _keep(rows, tuple(row), atom.const):
            return True
    while rows := _bounded(rows):
        lower: dict[int, int] = {}
        upper: dict[int, int] = {}
        for terms in rows:
            for term, c in terms:
                side = lower if c > 0 else upper
                side[term] = side.get(term, 0) + 1
        _, cheapest = min([(count * upper[term], term) for term, count in lower.items()])
        remaining = _without(rows, cheapest)
        if remaining is None:
            return True
        if len(remaining) > MAX_SYSTEM:
            return False
        rows = remaining
    return False


#: Factors by the number of their term, in ascending order.
_Row = tuple[tuple[int, int], ...]

#: row -> (constant, terms with a factor above 0, those with one below), the terms as bits.
_Rows = dict[_Row, tuple[int, int, int]]


def _bounded(rows: _Rows) -> _Rows:
    """The rows without terms that have no lower bound, or no upper one: those say nothing."""
    while True:
        any_above = any_below = 0
        for _, above, below in rows.values():
            any_above |= above
            any_below |= below
        if not (unbounded := any_above ^ any_below):
            return rows
        rows = {row: x for row, x in rows.items() if not (x[1] | x[2]) & unbounded}


def _without(rows: _Rows, term: int) -> _Rows | None:
    """The rows with a term eliminated; None if one of them is false."""
    remaining: _Rows = {}
    lower: list[tuple[int, dict[int, int], int]] = []
    upper: list[tuple[int, dict[int, int], int]] = []
    bit = 1 << term
    for row, known in rows.items():
        const, above, below = known
        if (above | below) & bit:
            terms = dict(row)
            c = terms.pop(term)
            (lower if c > 0 else upper).append((abs(c), terms, const))
        else:
            remaining[row] = known
    for a, low, const in lower:
        for b, high, limit in upper:
            total = {other: b * c for other, c in low.items()} if b > 1 else low.copy()
            for other, c in high.items():
                total[other] = total.get(other, 0) + a * c
            joined = sorted([item for item in total.items() if item[1]])
            if not _keep(remaining, tuple(joined), b * const + a * limit):
                return None
    return remaining


def _keep(rows: _Rows, row: _Row, const: int) -> bool:
    """Adds ``row + const >= 0`` in its strongest form, if it is not there; whether it can hold."""
    if not row:
        return const >= 0
    above = below = 0
    divisor = 0
    for term, c in row:
        if c > 0:
            above |= 1 << term
        else:
            below |= 1 << term
        if divisor != 1:
            divisor = gcd(divisor, c)
    if divisor > 1:
        row, const = tuple([(term, c // divisor) for term, c in row]), const // divisor
    known = rows.get(row)
    if known is None or const < known[0]:
        rows[row] = const, above, below
    return True


def with_axioms(system: Iterable[Affine], axioms: Axioms) -> list[Affine]:
    """The system and the axioms of its terms."""
    atoms = list(system)
    known: set[Any] = set()
    for atom in atoms:  # grows during the iteration: axioms of a term may hold other terms
        for term, _ in atom.terms:
            if not term.is_Symbol and term not in known:
                known.add(term)
                atoms += axioms(term)
    return atoms


@dataclass(frozen=True)
class Facts:
    """Inequalities that are known to hold, and their consequences.

    Attributes:
        atoms: each is >= 0.
        axioms: gives the axioms of a term.
        asked: the cache of whether systems are infeasible, shared with the facts of `given`.
    """

    atoms: tuple[Affine, ...]
    axioms: Axioms = quotient_axioms
    asked: dict[tuple[Affine, ...], bool] = field(default_factory=dict, compare=False, repr=False)

    def given(self, *more: Affine) -> Facts:
        """These facts with further ones."""
        return Facts(self.atoms + more, self.axioms, self.asked)

    @cached_property
    def contradictory(self) -> bool:
        """Whether they cannot all hold."""
        return self._infeasible(self.atoms)

    def _infeasible(self, system: tuple[Affine, ...]) -> bool:
        if system not in self.asked:
            self.asked[system] = infeasible(system, self.axioms)
        return self.asked[system]

    def proves(self, atom: Affine) -> bool:
        """Whether ``atom >= 0`` follows: its opposite contradicts the facts."""
        if not atom.terms:
            return atom.const >= 0
        if atom not in self._proved:
            self._proved[atom] = self._infeasible((*self.atoms, atom.negated()))
        return self._proved[atom]

    @cached_property
    def _proved(self) -> dict[Affine, bool]:
        """The cache of `proves`."""
        return {}

    def proves_all(self, atoms: Iterable[Affine]) -> bool:
        """Whether every ``atom >= 0`` follows."""
        return all(map(self.proves, atoms))

    def refutes(self, clauses: tuple[tuple[Affine, ...], ...], budget: int = 4096) -> bool:
        """Whether the facts contradict a conjunction of disjunctions of atoms.

        Depth first: take a clause, and refute the rest under each of its atoms in turn. A branch
        ends where the atoms picked so far already contradict the facts. More than ``budget``
        combinations are not tried (the answer is then "not refuted").
        """
        size = 1
        for clause in clauses:
            size *= max(1, len(clause))
        if size > budget:
            return False
        if self.contradictory:
            return True
        if not clauses:
            return False
        first, *rest = clauses
        return all(self.given(atom).refutes(tuple(rest), budget) for atom in first)
