"""Intervals of keys: solved from inequalities, simplified by what is known, merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, Facts, linearise, symbol
from flashgen.symbols import KV_IDX, KV_LEN, Q_FIRST, Q_LAST, FloorDiv

_ZERO, _KV_LEN = Affine(), symbol(KV_LEN)


@dataclass(frozen=True)
class KvInterval:
    """Keys that one part of the predicate lets a tile see. Everything is in keys, half open.

    Attributes:
        begin, end: the keys some row of the tile sees; within [0, kv_len], empty if end <= begin.
        full_begin, full_end: the keys that every row of the tile sees; within [0, kv_len], empty
            if full_end <= full_begin, otherwise inside [begin, end).
        condition: sympy Boolean; where it is false the interval is empty whatever its ends are.
        nonempty: a proof that ``begin < end`` and the condition hold for every tile.
    """

    begin: Any
    end: Any
    full_begin: Any
    full_end: Any
    condition: Any = sympy.true
    nonempty: bool = False

    @property
    def expressions(self) -> tuple[Any, ...]:
        """The ends and the condition."""
        return (self.begin, self.end, self.full_begin, self.full_end, self.condition)

    @classmethod
    def nothing(cls) -> KvInterval:
        """The empty interval."""
        zero = sympy.Integer(0)
        return cls(zero, zero, zero, zero)


def solve(atoms: Iterable[Affine], facts: Facts) -> tuple[Any, Any, Any]:
    """The keys in [0, kv_len) that satisfy every atom, as ``(begin, end, condition)``.

    ``c*kv_idx + rest >= 0`` bounds kv_idx from below for c > 0, by ``ceil(-rest / c)``, and from
    above for c < 0. Atoms without kv_idx are the condition, apart from those that the facts prove.
    """
    lower, upper, conditions = [_ZERO], [_KV_LEN], []
    for atom in atoms:
        c, rest = atom.coefficient(KV_IDX), atom.without(KV_IDX)
        if c > 0:
            lower.append(-_floor_quotient(rest, c))
        elif c < 0:
            upper.append(_floor_quotient(rest, -c) + 1)
        elif facts.given(rest).contradictory:
            return sympy.Integer(0), sympy.Integer(0), sympy.false
        elif not facts.proves(rest):
            conditions.append(_condition(rest))
    begin = _extreme(sympy.Max, lower, facts)
    end = _extreme(sympy.Min, upper, facts)
    if any(facts.proves(first - last) for first in begin for last in end):
        return sympy.Integer(0), sympy.Integer(0), sympy.false
    return (
        _most(sympy.Min, KV_LEN, _one(sympy.Max, [item.to_sympy() for item in begin]), facts),
        _most(
            sympy.Max, sympy.Integer(0), _one(sympy.Min, [item.to_sympy() for item in end]), facts
        ),
        sympy.And(*conditions),
    )


def merged(intervals: Iterable[KvInterval], facts: Facts) -> list[KvInterval]:
    """The same union in fewer intervals: every pair whose union is provably one is joined."""
    done: list[KvInterval] = []
    todo = list(intervals)
    while todo:
        new = todo.pop(0)
        for old in done:
            joined = _joined(old, new, facts)
            if joined is not None:
                done.remove(old)
                todo.insert(0, joined)
                break
        else:
            done.append(new)
    return done


def sorted_by_begin(intervals: Iterable[KvInterval], facts: Facts) -> list[KvInterval]:
    """Provably earlier intervals first; others keep their order."""
    placed: list[KvInterval] = []
    for interval in intervals:
        earlier = [i for i, p in enumerate(placed) if not at_least(p.begin, interval.begin, facts)]
        placed.insert(earlier[-1] + 1 if earlier else 0, interval)
    return placed


def at_least(a: Any, b: Any, facts: Facts) -> bool:
    """Whether the facts prove ``a >= b`` for expressions made of Min, Max and affine parts."""
    if isinstance(b, sympy.Max):
        return all(at_least(a, part, facts) for part in b.args)
    if isinstance(a, sympy.Min):
        return all(at_least(part, b, facts) for part in a.args)
    if isinstance(b, sympy.Min):
        return any(at_least(a, part, facts) for part in b.args)
    if isinstance(a, sympy.Max):
        return any(at_least(part, b, facts) for part in a.args)
    if isinstance(a, sympy.Piecewise) or isinstance(b, sympy.Piecewise):
        return False
    difference = linearise(a - b, frozenset())
    return difference is not None and facts.proves(difference)


def with_proofs(interval: KvInterval, facts: Facts) -> KvInterval:
    """The interval with `nonempty` set where the facts prove it."""
    always = interval.condition is sympy.true
    proved = always and at_least(interval.end, _plus_one(interval.begin), facts)
    return replace(interval, nonempty=proved)


def _plus_one(expr: Any) -> Any:
    """``expr + 1`` with the one carried into every Min and Max."""
    if isinstance(expr, sympy.Min | sympy.Max):
        return expr.func(*map(_plus_one, expr.args), evaluate=False)
    return expr + 1


def longest_end(intervals: Iterable[KvInterval]) -> str:
    """Which query tiles visit the most keys: the ``"first"``, the ``"last"``, or ``"even"``."""
    least = most = 0.0
    for interval in intervals:
        if interval.condition.free_symbols & {Q_FIRST, Q_LAST}:
            return "even"
        begin, end = _slopes(interval.begin), _slopes(interval.end)
        least += min(end) - max(begin)
        most += max(end) - min(begin)
    if least >= 0 and most > 0:
        return "last"
    return "first" if most <= 0 and least < 0 else "even"


def _slopes(expr: Any) -> tuple[float, ...]:
    """How many keys ``expr`` may move by when the tile moves down a row."""
    if isinstance(expr, sympy.Min | sympy.Max):
        return tuple(slope for part in expr.args for slope in _slopes(part))
    affine = linearise(expr, frozenset())
    assert affine is not None, expr
    total = float(affine.coefficient(Q_FIRST) + affine.coefficient(Q_LAST))
    for term, c in affine.terms:
        if isinstance(term, FloorDiv) and term.free_symbols & {Q_FIRST, Q_LAST}:
            total += c * _slopes(term.args[0])[0] / float(term.args[1])
    return (total,)


def _joined(a: KvInterval, b: KvInterval, facts: Facts) -> KvInterval | None:
    """``a`` and ``b`` as one interval, or None where their union is not provably one.

    Intervals with an end in common make one even when either is empty; one inside the other goes.
    """
    if a.condition == b.condition and a.begin == b.begin:
        whole = replace(a, end=_most(sympy.Max, a.end, b.end, facts))
    elif a.condition == b.condition and a.end == b.end:
        whole = replace(a, begin=_most(sympy.Min, a.begin, b.begin, facts))
    elif _contains(a, b, facts):
        whole = a
    elif _contains(b, a, facts):
        whole = b
    else:
        return None
    full_begin, full_end = _joined_full(a, b, facts)
    return replace(whole, full_begin=full_begin, full_end=full_end)


def _contains(outer: KvInterval, inner: KvInterval, facts: Facts) -> bool:
    return (
        outer.condition in (sympy.true, inner.condition)
        and at_least(inner.begin, outer.begin, facts)
        and at_least(outer.end, inner.end, facts)
    )


def _joined_full(a: KvInterval, b: KvInterval, facts: Facts) -> tuple[Any, Any]:
    """The full keys of a joined interval: both parts' where they make one, else one part's."""
    if sympy.Piecewise in (a.full_end.func, b.full_end.func) or a.condition != b.condition:
        return a.full_begin, a.full_end
    if a.full_begin == b.full_begin:
        return a.full_begin, _most(sympy.Max, a.full_end, b.full_end, facts)
    if a.full_end == b.full_end:
        return _most(sympy.Min, a.full_begin, b.full_begin, facts), a.full_end
    if at_least(a.full_begin, b.full_begin, facts) and at_least(b.full_end, a.full_end, facts):
        return b.full_begin, b.full_end
    return a.full_begin, a.full_end


def _most(pick: Any, a: Any, b: Any, facts: Facts) -> Any:
    """``Max(a, b)`` or ``Min(a, b)``, as one of them where the facts decide."""
    larger, smaller = (a, b) if pick is sympy.Max else (b, a)
    if at_least(a, b, facts):
        return larger
    if at_least(b, a, facts):
        return smaller
    dual = sympy.Min if pick is sympy.Max else sympy.Max
    shared = set(a.args) & set(b.args) if a.func == b.func == dual else set()
    if not shared:
        return pick(a, b, evaluate=False)
    # Max(Min(n, x), Min(n, y)) is Min(n, Max(x, y)).
    x, y = ([part for part in side.args if part not in shared] for side in (a, b))
    inner = pick(_one(dual, x), _one(dual, y), evaluate=False)
    return dual(*sorted(shared, key=str), inner, evaluate=False)


def _one(pick: Any, parts: list[Any]) -> Any:
    """``Max`` or ``Min`` of the parts, as written: the facts have already simplified them."""
    return parts[0] if len(parts) == 1 else pick(*parts, evaluate=False)


def _condition(atom: Affine) -> Any:
    """``atom >= 0`` as ``a >= b`` without negative terms."""
    positive = Affine.of({t: c for t, c in atom.terms if c > 0}, max(atom.const, 0))
    negative = positive - atom
    condition = sympy.Ge(positive.to_sympy(), negative.to_sympy(), evaluate=False)
    return condition if positive.terms else condition.reversed


def _floor_quotient(numerator: Affine, divisor: int) -> Affine:
    """``floor(numerator / divisor)``; a term of its own unless the division is by one."""
    if divisor == 1:
        return numerator
    return symbol(FloorDiv(numerator.to_sympy(), sympy.Integer(divisor)))


def _extreme(pick: Any, items: list[Affine], facts: Facts) -> list[Affine]:
    """``items`` without those that another one provably dominates in ``Max`` or ``Min``."""
    kept: list[Affine] = []
    sign = 1 if pick is sympy.Max else -1
    for item in dict.fromkeys(items):
        if not any(facts.proves((other - item) * sign) for other in kept):
            kept = [other for other in kept if not facts.proves((item - other) * sign)]
            kept.append(item)
    return kept
