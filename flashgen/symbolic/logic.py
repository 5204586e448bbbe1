"""From a predicate to a disjunction of systems of affine inequalities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine
from flashgen.symbolic.entailment import Facts

#: A part of a predicate with more ways to satisfy it than this becomes opaque.
MAX_CONJUNCTIONS = 64

#: Up to this many conjunctions are weakened against one another.
MAX_WEAKENED = 6


@dataclass(frozen=True)
class Conjunction:
    """``every atom >= 0``, and every opaque condition.

    Attributes:
        atoms: affine in the solved position, with a factor of 1 or -1, and in terms of the other.
        opaque: all other conditions, unchanged. Bounds assume that they are true where that widens
            an interval, and false where a key would otherwise be unmasked.
    """

    atoms: tuple[Affine, ...] = ()
    opaque: tuple[Any, ...] = ()

    def __and__(self, other: Conjunction) -> Conjunction:
        return Conjunction(
            tuple(dict.fromkeys(self.atoms + other.atoms)),
            tuple(dict.fromkeys(self.opaque + other.opaque)),
        )


#: The ways to satisfy one comparison.
Read = Callable[[Any], list[Conjunction]]


def negation_normal_form(expr: Any, negate: bool = False) -> Any:
    """``expr`` (or its opposite) with every ``~`` pushed into the comparisons."""
    if isinstance(expr, sympy.Not):
        return negation_normal_form(expr.args[0], not negate)
    if isinstance(expr, sympy.And | sympy.Or):
        join = sympy.Or if isinstance(expr, sympy.And) == negate else sympy.And
        return join(*(negation_normal_form(arg, negate) for arg in expr.args))
    return sympy.Not(expr) if negate else expr


def conditions(expr: Any) -> tuple[Any, ...]:
    """The conditions that all have to hold; none if everything is visible."""
    if expr is sympy.true:
        return ()
    return tuple(expr.args) if isinstance(expr, sympy.And) else (expr,)


def leaves(expr: Any) -> list[Any]:
    """The conditions that a condition in negation normal form joins by And and Or."""
    if isinstance(expr, sympy.And | sympy.Or):
        return [leaf for arg in expr.args for leaf in leaves(arg)]
    return [expr]


def conjunctions(expr: Any, facts: Facts, read: Read) -> list[Conjunction]:
    """Disjunctive normal form of a predicate: as few conjunctions, as weak, as can be proved.

    A conjunction that cannot hold or that implies another is dropped, and so is an atom that the
    other atoms prove. A window beside a causal mask then costs nothing, and a predicate that hides
    nothing is the empty conjunction.
    """
    found = [reduced(c, facts) for c in distribute(negation_normal_form(expr), read)]
    found = _absorbed([c for c in found if not facts.given(*c.atoms).contradictory], facts)
    if 1 < len(found) <= MAX_WEAKENED:
        for i in range(len(found)):
            found[i] = _weakened(found[i], found[:i] + found[i + 1 :], facts)
        found = _absorbed([reduced(c, facts) for c in found], facts)
    return found


def _weakened(conjunction: Conjunction, others: list[Conjunction], facts: Facts) -> Conjunction:
    """The conjunction with atoms dropped, or exchanged for weaker ones of ``others``, as long as
    ``others`` cover the elements that it gains: the union stays the same.
    """
    outside = tuple(tuple(a.negated() for a in other.atoms) for other in others if not other.opaque)
    weaker = [atom for other in others for atom in other.atoms]
    for atom in conjunction.atoms:
        rest = tuple(a for a in conjunction.atoms if a != atom)
        for replacement in ((), *((w,) for w in weaker if w != atom)):
            gained = facts.given(*rest, *replacement, atom.negated())
            if gained.refutes(outside) and facts.given(*rest, atom).proves_all(replacement):
                conjunction = Conjunction(rest + replacement, conjunction.opaque)
                break
    return conjunction


def _absorbed(found: list[Conjunction], facts: Facts) -> list[Conjunction]:
    """The conjunctions without those that imply another one."""
    kept: list[Conjunction] = []
    for candidate in found:
        if not any(_implies(candidate, other, facts) for other in kept):
            kept = [other for other in kept if not _implies(other, candidate, facts)]
            kept.append(candidate)
    return kept


def reduced(conjunction: Conjunction, facts: Facts) -> Conjunction:
    """The conjunction without the atoms that the facts and its other atoms prove."""
    return Conjunction(independent(conjunction.atoms, facts), conjunction.opaque)


def independent(atoms: Iterable[Affine], facts: Facts) -> tuple[Affine, ...]:
    """``atoms`` without those that the facts and the remaining atoms prove; earlier atoms stay."""
    kept = list(dict.fromkeys(atoms))
    for atom in reversed(tuple(kept)):
        others = [other for other in kept if other != atom]
        if facts.given(*others).proves(atom):
            kept = others
    return tuple(kept)


def _implies(a: Conjunction, b: Conjunction, facts: Facts) -> bool:
    """Whether every solution of ``a`` satisfies ``b``."""
    return set(b.opaque) <= set(a.opaque) and facts.given(*a.atoms).proves_all(b.atoms)


def distribute(expr: Any, read: Read) -> list[Conjunction]:
    """Every way to satisfy ``expr``. A part with too many ways becomes opaque."""
    if expr is sympy.true:
        return [Conjunction()]
    if expr is sympy.false:
        return []
    if isinstance(expr, sympy.And):
        ways = [Conjunction()]
        for arg in expr.args:
            more = distribute(arg, read)
            if len(ways) * len(more) > MAX_CONJUNCTIONS:
                more = [Conjunction(opaque=(arg,))]
            ways = [a & b for a in ways for b in more]
        return ways
    if isinstance(expr, sympy.Or):
        ways = [way for arg in expr.args for way in distribute(arg, read)]
    else:
        ways = read(expr)
    return ways if len(ways) <= MAX_CONJUNCTIONS else [Conjunction(opaque=(expr,))]
