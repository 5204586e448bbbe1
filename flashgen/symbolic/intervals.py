"""Intervals of keys: solved from inequalities, simplified by facts, merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.entailment import Facts
from flashgen.symbolic.logic import independent
from flashgen.symbolic.quotients import ceil_div, floor_div
from flashgen.symbolic.trace import Orientation


@dataclass(frozen=True)
class Interval:
    """Keys that one part of the predicate lets a tile of rows see; or rows, for a tile of keys.

    Intervals are half open, in positions; the attributes are described for keys of a tile of rows.

    Attributes:
        begin, end: the keys some row of the tile sees; within [0, kv_len], empty if end <= begin.
        full_begin, full_end: the keys that every row of the tile sees; within [0, kv_len], empty
            if full_end <= full_begin, otherwise inside [begin, end).
        condition: sympy Boolean; if it is false the interval is empty, whatever its ends are.
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
    def nothing(cls) -> Interval:
        """The empty interval."""
        zero = sympy.Integer(0)
        return cls(zero, zero, zero, zero)


def solve(atoms: Iterable[Affine], facts: Facts, orientation: Orientation) -> tuple[Any, Any, Any]:
    """The keys in [0, kv_len) that satisfy every atom, as ``(begin, end, condition)``.

    ``c*kv_idx + rest >= 0`` bounds kv_idx from below for c > 0, by ``ceil(-rest / c)``, and from
    above for c < 0. Atoms without kv_idx are the condition, apart from those that the facts prove.
    """
    zero, nothing = sympy.Integer(0), (sympy.Integer(0), sympy.Integer(0), sympy.false)
    lower, upper, conditions = [Affine()], [symbol(orientation.solved_len)], []
    for atom in atoms:
        c, rest = atom.coefficient(orientation.solved), atom.without(orientation.solved)
        if c > 0:
            lower.append(_quotient(ceil_div, -rest, c))
        elif c < 0:
            upper.append(_quotient(floor_div, rest, -c) + 1)
        elif facts.given(rest).contradictory:
            return nothing
        elif not facts.proves(rest):
            conditions.append(rest)
    begin = _extreme(sympy.Max, lower, facts)
    end = _extreme(sympy.Min, upper, facts)
    if any(facts.proves(first - last) for first in begin for last in end):
        return nothing
    # An interval that holds a key may meet a condition for this reason alone.
    holds_one = facts.given(*(after - before - 1 for before in begin for after in end))
    conditions = list(independent(conditions, holds_one))
    first = _one(sympy.Max, [item.to_sympy() for item in begin])
    last = _one(sympy.Min, [item.to_sympy() for item in end])
    return (
        most(sympy.Min, orientation.solved_len, first, facts),
        most(sympy.Max, zero, last, facts),
        sympy.And(*map(_condition, conditions)),
    )


def merged(intervals: Iterable[Interval], facts: Facts) -> list[Interval]:
    """Fewer intervals with the same union: a pair that is provably one interval is joined."""
    done: list[Interval] = []
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


def sorted_by_begin(intervals: Iterable[Interval], facts: Facts) -> list[Interval]:
    """Intervals with provably earlier ones first; others keep their order."""
    placed: list[Interval] = []
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
    difference = linearise(a - b)
    return difference is not None and facts.proves(difference)


def with_proofs(interval: Interval, facts: Facts) -> Interval:
    """The interval with `nonempty` set where the facts prove it."""
    always = interval.condition is sympy.true
    proved = always and at_least(interval.end, _plus_one(interval.begin), facts)
    return replace(interval, nonempty=proved)


def _plus_one(expr: Any) -> Any:
    """``expr + 1``, with the 1 added inside every Min and Max."""
    if isinstance(expr, sympy.Min | sympy.Max):
        return expr.func(*map(_plus_one, expr.args), evaluate=False)
    return expr + 1


def _joined(a: Interval, b: Interval, facts: Facts) -> Interval | None:
    """``a`` and ``b`` as one interval, or None where their union is not provably one.

    Adjacent intervals form one even if either is empty; an interval inside the other is dropped.
    """
    if a.condition == b.condition and a.begin == b.begin:
        whole = replace(a, end=most(sympy.Max, a.end, b.end, facts))
    elif a.condition == b.condition and a.end == b.end:
        whole = replace(a, begin=most(sympy.Min, a.begin, b.begin, facts))
    elif _contains(a, b, facts):
        whole = a
    elif _contains(b, a, facts):
        whole = b
    else:
        return None
    full_begin, full_end = _joined_full(a, b, facts)
    return replace(whole, full_begin=full_begin, full_end=full_end)


def _contains(outer: Interval, inner: Interval, facts: Facts) -> bool:
    return (
        outer.condition in (sympy.true, inner.condition)
        and at_least(inner.begin, outer.begin, facts)
        and at_least(outer.end, inner.end, facts)
    )


def _joined_full(a: Interval, b: Interval, facts: Facts) -> tuple[Any, Any]:
    """The full keys of a joined interval: of both parts if they form one run, else of one part."""
    if a.condition != b.condition:
        return a.full_begin, a.full_end
    if sympy.Piecewise in (a.full_end.func, b.full_end.func):
        return _longer_at_times(a, b, facts) or (a.full_begin, a.full_end)
    if a.full_begin == b.full_begin:
        return a.full_begin, most(sympy.Max, a.full_end, b.full_end, facts)
    if a.full_end == b.full_end:
        return most(sympy.Min, a.full_begin, b.full_begin, facts), a.full_end
    if at_least(a.full_begin, b.full_begin, facts) and at_least(b.full_end, a.full_end, facts):
        return b.full_begin, b.full_end
    return a.full_begin, a.full_end


def _longer_at_times(a: Interval, b: Interval, facts: Facts) -> tuple[Any, Any] | None:
    """The full keys of ``a``, from where those of ``b`` begin in tiles where ``b`` has any.

    None where both do not end together, or ``b`` does not provably begin first.
    """
    for always, at_times in ((a, b), (b, a)):
        if not isinstance(at_times.full_end, sympy.Piecewise):
            continue
        (end, condition), _ = at_times.full_end.args
        first, last = at_times.full_begin, always.full_begin
        if end == always.full_end and at_least(last, first, facts):
            return sympy.Piecewise((first, condition), (last, True), evaluate=False), end
    return None


def most(pick: Any, a: Any, b: Any, facts: Facts) -> Any:
    """``Max(a, b)`` or ``Min(a, b)``, without arguments that the facts prove redundant."""
    kept: list[Any] = []
    for part in (part for side in (a, b) for part in (side.args if side.func == pick else (side,))):
        if not any(_beats(pick, other, part, facts) for other in kept):
            kept = [other for other in kept if not _beats(pick, part, other, facts)]
            kept.append(part)
    if len(kept) != 2:
        return _one(pick, kept)
    a, b = kept
    dual = sympy.Min if pick is sympy.Max else sympy.Max
    shared = set(a.args) & set(b.args) if a.func == b.func == dual else set()
    if not shared:
        return _one(pick, kept)
    # Max(Min(n, x), Min(n, y)) is Min(n, Max(x, y)).
    x, y = ([part for part in side.args if part not in shared] for side in (a, b))
    if not (x and y):  # Max(Min(n, m), Min(n, m, y)) is Min(n, m)
        return b if x else a
    inner = pick(_one(dual, x), _one(dual, y), evaluate=False)
    return dual(*sorted(shared, key=str), inner, evaluate=False)


def _beats(pick: Any, a: Any, b: Any, facts: Facts) -> bool:
    """Whether ``Max(a, b)`` or ``Min(a, b)`` is a."""
    return at_least(a, b, facts) if pick is sympy.Max else at_least(b, a, facts)


def _one(pick: Any, parts: list[Any]) -> Any:
    """``Max`` or ``Min`` of the parts, unevaluated: the facts have already simplified them."""
    return parts[0] if len(parts) == 1 else pick(*parts, evaluate=False)


def _condition(atom: Affine) -> Any:
    """``atom >= 0`` as ``a >= b`` without negative terms; an indicator as its condition."""
    if len(atom.terms) == 1 and isinstance(atom.terms[0][0], sympy.Piecewise):
        ((choice, c),) = atom.terms
        (yes, when), (no, _) = choice.args[0], choice.args[-1]
        if (yes, no) == (1, 0) and len(choice.args) == 2 and -1 <= atom.const <= 0:
            return when if c > 0 else sympy.Not(when)
    positive = Affine.of({t: c for t, c in atom.terms if c > 0}, max(atom.const, 0))
    negative = positive - atom
    condition = sympy.Ge(positive.to_sympy(), negative.to_sympy(), evaluate=False)
    return condition if positive.terms else condition.reversed


def _quotient(divide: Any, numerator: Affine, divisor: int) -> Affine:
    """``numerator / divisor``, rounded as ``divide`` does."""
    if divisor == 1:
        return numerator
    quotient = linearise(divide(numerator.to_sympy(), sympy.Integer(divisor)))
    assert quotient is not None
    return quotient


def _extreme(pick: Any, items: list[Affine], facts: Facts) -> list[Affine]:
    """``items`` without those that another one provably dominates in ``Max`` or ``Min``."""
    kept: list[Affine] = []
    sign = 1 if pick is sympy.Max else -1
    for item in dict.fromkeys(items):
        if not any(facts.proves((other - item) * sign) for other in kept):
            kept = [other for other in kept if not facts.proves((item - other) * sign)]
            kept.append(item)
    return kept
