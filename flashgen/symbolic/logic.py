"""From a predicate to a disjunction of systems of affine inequalities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, Facts, linearise
from flashgen.symbols import KV_IDX, Q_IDX

POSITIONS = frozenset((Q_IDX, KV_IDX))

#: A predicate with more conjunctions than this is not analysed further.
MAX_CONJUNCTIONS = 32


@dataclass(frozen=True)
class Conjunction:
    """``every atom >= 0``, and every opaque condition.

    Attributes:
        atoms: affine in q_idx and kv_idx.
        opaque: conditions that are not, kept as they are.
    """

    atoms: tuple[Affine, ...] = ()
    opaque: tuple[Any, ...] = ()

    def __and__(self, other: Conjunction) -> Conjunction:
        return Conjunction(
            tuple(dict.fromkeys(self.atoms + other.atoms)),
            tuple(dict.fromkeys(self.opaque + other.opaque)),
        )


def negation_normal_form(expr: Any, negate: bool = False) -> Any:
    """``expr`` (or its opposite) with every ``~`` pushed into the comparisons."""
    if isinstance(expr, sympy.Not):
        return negation_normal_form(expr.args[0], not negate)
    if isinstance(expr, sympy.And | sympy.Or):
        join = sympy.Or if isinstance(expr, sympy.And) == negate else sympy.And
        return join(*(negation_normal_form(arg, negate) for arg in expr.args))
    return sympy.Not(expr) if negate else expr


def conjunctions(expr: Any, facts: Facts) -> list[Conjunction]:
    """Disjunctive normal form of a predicate, without the conjunctions that cannot hold.

    A conjunction that implies another is absorbed, and an atom that follows from the others of its
    conjunction is dropped, so that a window inside a causal mask costs nothing.
    """
    found = [reduced(c, facts) for c in _distribute(negation_normal_form(expr))]
    kept: list[Conjunction] = []
    for candidate in (c for c in found if not facts.given(*c.atoms).contradictory):
        if any(_implies(candidate, other, facts) for other in kept):
            continue
        kept = [other for other in kept if not _implies(other, candidate, facts)]
        kept.append(candidate)
    return kept


def reduced(conjunction: Conjunction, facts: Facts) -> Conjunction:
    """The conjunction without the atoms that the facts and its other atoms prove."""
    return Conjunction(independent(conjunction.atoms, facts), conjunction.opaque)


def independent(atoms: Iterable[Affine], facts: Facts) -> tuple[Affine, ...]:
    """``atoms`` without those that the facts and the remaining ones prove; first ones stay."""
    kept = list(dict.fromkeys(atoms))
    for atom in reversed(tuple(kept)):
        others = [other for other in kept if other != atom]
        if facts.given(*others).proves(atom):
            kept = others
    return tuple(kept)


def _implies(a: Conjunction, b: Conjunction, facts: Facts) -> bool:
    """Whether whatever satisfies ``a`` satisfies ``b``."""
    known = facts.given(*a.atoms)
    return set(b.opaque) <= set(a.opaque) and all(known.proves(atom) for atom in b.atoms)


def _distribute(expr: Any) -> list[Conjunction]:
    if expr is sympy.true:
        return [Conjunction()]
    if expr is sympy.false:
        return []
    if isinstance(expr, sympy.Or):
        return [c for arg in expr.args for c in _distribute(arg)]
    if isinstance(expr, sympy.And):
        choices = [_distribute(arg) for arg in expr.args]
        result = []
        for choice in product(*choices):
            whole = Conjunction()
            for part in choice:
                whole &= part
            result.append(whole)
        return result
    return _comparison(expr)


def _comparison(relation: Any) -> list[Conjunction]:
    """One comparison over the integers: ``a > b`` is ``a - b - 1 >= 0``, ``a != b`` is two cases."""
    difference = relation.lhs - relation.rhs
    cases = {
        sympy.Ge: [[difference]],
        sympy.Gt: [[difference - 1]],
        sympy.Le: [[-difference]],
        sympy.Lt: [[-difference - 1]],
        sympy.Eq: [[difference, -difference]],
        sympy.Ne: [[difference - 1], [-difference - 1]],
    }[relation.func]
    result = []
    for case in cases:
        systems = [Conjunction()]
        for expr in case:
            systems = [s & part for s in systems for part in _nonnegative(expr, relation)]
        result += systems
    return result


def _nonnegative(expr: Any, relation: Any) -> list[Conjunction]:
    """``expr >= 0``. With |x| in it: ``e - |x| >= 0`` is both of ``e - x`` and ``e + x``,
    ``e + |x| >= 0`` is either.
    """
    absolute = next(iter(expr.atoms(sympy.Abs)), None)
    if absolute is None:
        atom = linearise(expr, POSITIONS)
        return [Conjunction((atom.tightened(),)) if atom else Conjunction(opaque=(relation,))]
    factor = sympy.expand(expr).coeff(absolute)
    rest = sympy.expand(expr - factor * absolute)
    if not factor.is_Integer or rest.has(absolute):
        return [Conjunction(opaque=(relation,))]
    plus, minus = (
        _nonnegative(rest + factor * x, relation) for x in (absolute.args[0], -absolute.args[0])
    )
    return plus + minus if factor > 0 else [a & b for a in plus for b in minus]
