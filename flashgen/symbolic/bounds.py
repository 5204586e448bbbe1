"""derive_bounds: which keys a tile of query rows must visit, and which need no masking.

A tile is the rows q_first..q_last of the queries. For each conjunction of the predicate

- a key is *visible* when some row of the tile sees it: eliminate q_idx from the conjunction and
  q_first <= q_idx <= q_last (Fourier-Motzkin). What remains bounds kv_idx from below and above.
- a key is *full* when every row sees it: "for all" is "not exists not", and the rows that break
  ``a*q_idx + rest >= 0`` exist exactly when it breaks at one end of the tile, q_first for a > 0
  and q_last for a < 0.

Both are exact where every coefficient is a unit, as it is in causal masks, windows and all their
combinations. Nothing here knows a mask's name, and lengths and parameters stay symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import sympy

from flashgen.params import Int
from flashgen.symbolic.affine import Facts, eliminate, symbol
from flashgen.symbolic.intervals import (
    KvInterval,
    at_least,
    longest_end,
    merged,
    solve,
    sorted_by_begin,
    with_proofs,
)
from flashgen.symbolic.logic import Conjunction, conjunctions, independent
from flashgen.symbolic.printer import torch_source
from flashgen.symbolic.trace import Predicate
from flashgen.symbols import KV_IDX, KV_LEN, Q_FIRST, Q_IDX, Q_LAST, Q_LEN, B, H

#: A union of more intervals than this is replaced by its hull.
MAX_INTERVALS = 4

_Q, _KV = symbol(Q_IDX), symbol(KV_IDX)
_FIRST, _LAST = symbol(Q_FIRST), symbol(Q_LAST)
_Q_LEN, _KV_LEN = symbol(Q_LEN), symbol(KV_LEN)


@dataclass(frozen=True)
class TileBounds:
    """The keys that a tile of query rows visits.

    Attributes:
        intervals: their union is what must be visited. At least one; at run time any of them may
            be empty and two may overlap.
        rows_can_be_empty: some row may see no key at all. False is a proof that none does, for
            lengths >= 1, parameters >= their min and, where demanded, equal lengths.
        exact: every key of an interval is visible to some row of the tile.
        notes: what was not exact, and why.
        longest_first: the end of the query tiles that has the most work: ``"first"``, ``"last"``
            or, where neither always has, ``"even"``.
        sorted: the intervals' begins provably ascend in the order given.
    """

    intervals: tuple[KvInterval, ...]
    rows_can_be_empty: bool
    exact: bool
    notes: tuple[str, ...]
    longest_first: str
    sorted: bool


def derive_bounds(predicate: Predicate) -> TileBounds:
    """Derive the tile bounds of a predicate, with lengths and parameters as symbols."""
    scalars = _scalar_facts(predicate.params, predicate.equal_lengths)
    tile = scalars.given(_FIRST, _LAST - _FIRST, _Q_LEN - 1 - _LAST)
    element = scalars.given(_Q, _Q_LEN - 1 - _Q, _KV, _KV_LEN - 1 - _KV)
    cases = conjunctions(predicate.expr, element)

    notes: list[str] = []
    intervals: list[KvInterval] = []
    for case in cases:
        interval, remarks = _interval(case, tile)
        notes += remarks
        if interval is not None:
            intervals.append(interval)
    intervals = sorted_by_begin(merged(intervals, tile), tile)
    if len(intervals) > MAX_INTERVALS:
        notes.append(f"{len(intervals)} separate intervals: replaced by the one around them all")
        intervals = [_hull(intervals)]
    return TileBounds(
        intervals=tuple(with_proofs(i, tile) for i in intervals) or (KvInterval.nothing(),),
        rows_can_be_empty=not _every_row_sees_a_key(cases, element),
        exact=not notes,
        notes=tuple(dict.fromkeys(notes)),
        longest_first=longest_end(intervals),
        sorted=all(at_least(b.begin, a.begin, tile) for a, b in pairwise(intervals)),
    )


def _scalar_facts(params: tuple[Int, ...], equal_lengths: bool) -> Facts:
    """What holds for the run-time scalars: lengths from 1 up, parameters from their min up."""
    atoms = [_Q_LEN - 1, _KV_LEN - 1, symbol(B), symbol(H)]
    atoms += [symbol(param.sym) - param.min for param in params]
    if equal_lengths:
        atoms += [_Q_LEN - _KV_LEN, _KV_LEN - _Q_LEN]
    return Facts(tuple(atoms))


def _interval(case: Conjunction, tile: Facts) -> tuple[KvInterval | None, list[str]]:
    """The visible and the full keys of one conjunction (None: it never holds), and remarks."""
    notes = [f"not affine in q_idx and kv_idx: {torch_source(part)}" for part in case.opaque]
    rows = (_Q - _FIRST, _LAST - _Q)
    some_row, exact = eliminate((*case.atoms, *rows), Q_IDX)
    if not exact:
        notes.append("coefficients of q_idx other than 1 and -1: the interval may be too wide")
    begin, end, condition = solve(some_row, tile)
    if condition is sympy.false:
        return None, []
    if case.opaque:
        return KvInterval(begin, end, begin, begin, condition), notes
    every_row = [
        atom.substitute(Q_IDX, _FIRST if atom.coefficient(Q_IDX) > 0 else _LAST)
        for atom in case.atoms
    ]
    full_begin, full_end, full_condition = solve(every_row, tile)
    if full_condition is not sympy.true:
        full_end = sympy.Piecewise((full_end, full_condition), (full_begin, True), evaluate=False)
    return KvInterval(begin, end, full_begin, full_end, condition), notes


def _hull(intervals: list[KvInterval]) -> KvInterval:
    """One interval around all of them; the full keys of the first stand for all."""
    return KvInterval(
        begin=sympy.Min(*(i.begin for i in intervals)),
        end=sympy.Max(*(i.end for i in intervals)),
        full_begin=intervals[0].full_begin,
        full_end=intervals[0].full_end,
        condition=sympy.true,
    )


def _every_row_sees_a_key(cases: list[Conjunction], element: Facts) -> bool:
    """Whether each row sees some key: its conjunctions' projections onto q_idx cover all rows.

    Projecting a conjunction along kv_idx in [0, kv_len) gives the rows that see a key through it.
    A row outside all of them breaks an atom of each: refuting that is the proof.
    """
    clauses = []
    keys = (_KV, _KV_LEN - 1 - _KV)
    for case in cases:
        rows, exact = eliminate((*case.atoms, *keys), KV_IDX)
        if exact and not case.opaque:
            clauses.append(tuple(atom.negated() for atom in independent(rows, element)))
    return element.refutes(tuple(clauses))
