"""derive_bounds: which keys a tile of query rows must visit, and which need no masking.

A tile is the rows q_first..q_last of the queries. For each conjunction of the predicate

- a key is *visible* when some row of the tile sees it: eliminate q_idx from the conjunction and
  q_first <= q_idx <= q_last (Fourier-Motzkin). What remains bounds kv_idx from below and above.
- a key is *full* when every row sees it: "for all" is "not exists not", and the rows that break
  ``a*q_idx + rest >= 0`` exist exactly when it breaks at one end of the tile, q_first for a > 0
  and q_last for a < 0.

Blocks (``q_idx // 64``), gathers (``doc[b, q_idx]``) and other expressions of q_idx are further
variables: see `projection`. `derive_q_bounds` answers the transposed question, with rows and keys
exchanged. Nothing here knows a mask's name, and lengths and parameters stay symbols.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import sympy

from flashgen.symbolic.affine import eliminate
from flashgen.symbolic.blocks import block_table
from flashgen.symbolic.cases import cases_of
from flashgen.symbolic.context import Context, within
from flashgen.symbolic.contiguous import seen_without_gaps
from flashgen.symbolic.equal_terms import solvable
from flashgen.symbolic.intervals import (
    Interval,
    at_least,
    merged,
    most,
    solve,
    sorted_by_begin,
    with_proofs,
)
from flashgen.symbolic.key_ranges import certain, holds_range
from flashgen.symbolic.logic import Conjunction, independent
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.projection import seen_by_every_row, seen_by_some_row
from flashgen.symbolic.tables import RangeTable, RowTable
from flashgen.symbolic.tile_balance import longest_end
from flashgen.symbolic.trace import KEYS_OF_ROWS, ROWS_OF_KEYS, Orientation, Predicate
from flashgen.symbols import Load

#: A union of more intervals than this is replaced by its hull.
MAX_INTERVALS = 4

#: A condition on a tile with more parts than this is not evaluated: the tile is visited anyway.
MAX_CONDITIONS = 8


@dataclass(frozen=True)
class TileBounds:
    """The keys that a tile of query rows visits, or the rows that visit a tile of keys.

    Attributes:
        intervals: their union is what must be visited. At least one; at run time any of them may
            be empty and two may overlap.
        rows_can_be_empty: some row may see no key at all. False is a proof that every row sees one,
            for lengths >= 1, parameters >= their min and, where demanded, equal lengths.
        exact: every key of an interval is visible to some row of the tile.
        diagnostics: what was not exact, and why.
        longest_first: the end of a head at which the query tiles have the most work: ``"first"``,
            ``"last"`` or, if neither always has it, ``"even"``.
        sorted: the begins of the intervals, in their order, provably ascend.
        tables: the row tables that the intervals read.
        ranges: the range tables that they read.
    """

    intervals: tuple[Interval, ...]
    rows_can_be_empty: bool
    exact: bool
    diagnostics: tuple[str, ...]
    longest_first: str
    sorted: bool
    tables: tuple[RowTable, ...] = ()
    ranges: tuple[RangeTable, ...] = ()


@lru_cache(maxsize=1024)  # a build asks for the same ones at several steps, of every spec
def derive_bounds(
    predicate: Predicate, max_intervals: int = MAX_INTERVALS, *, ranges: bool = False
) -> TileBounds:
    """The keys that a tile of rows visits, with lengths and parameters as symbols.

    The bounds are in terms of q_first and q_last, within [0, kv_len]. With ``ranges`` they read
    range tables, where the mask has conditions on keys alone.
    """
    return _derive(predicate, KEYS_OF_ROWS, max_intervals, ranges)


@lru_cache(maxsize=1024)  # a build asks for the same ones at several steps, of every spec
def derive_q_bounds(
    predicate: Predicate, max_intervals: int = MAX_INTERVALS, *, ranges: bool = False
) -> TileBounds:
    """The rows that visit a tile of keys: `derive_bounds` with rows and keys exchanged.

    In terms of kv_first and kv_last, within [0, q_len]. `rows_can_be_empty` then tells whether some
    key may be hidden from all rows. The predicate is the user's own, without row tables.
    """
    return _derive(predicate, ROWS_OF_KEYS, max_intervals, ranges)


def _derive(
    predicate: Predicate, orientation: Orientation, max_intervals: int, ranges: bool
) -> TileBounds:
    terms = solvable(predicate.expr, orientation.tile, orientation.solved)
    context, cases = cases_of(replace(predicate, expr=terms), orientation, ranges=ranges)
    tile = context.tile
    diagnostics: list[str] = []
    intervals: list[Interval] = []
    for case in cases:
        interval, remarks = _interval(case, context)
        diagnostics += remarks
        if interval is not None:
            intervals.append(interval)
    intervals = sorted_by_begin(merged(intervals, tile), tile)
    if len(intervals) > max_intervals:
        diagnostics.append(
            f"{len(intervals)} separate intervals: replaced by the one around them all"
        )
        intervals = [_hull(intervals, context)]
    read = {s for i in intervals for e in i.expressions for s in e.free_symbols}
    return TileBounds(
        intervals=tuple(
            # Nothing is proved about rows with a hidden id.
            i if any(map(context.hides, i.expressions)) else with_proofs(i, tile)
            for i in intervals
        )
        or (Interval.nothing(),),
        rows_can_be_empty=_can_be_empty(cases, predicate, context),
        exact=not diagnostics,
        diagnostics=tuple(dict.fromkeys(diagnostics)),
        longest_first=longest_end(intervals, orientation, context.declarations),
        sorted=all(at_least(b.begin, a.begin, tile) for a, b in pairwise(intervals)),
        tables=tuple(table for table in context.predicate.tables if table.sym in read),
        ranges=tuple(table for table in context.range_tables if table.sym in read),
    )


def _interval(case: Conjunction, context: Context) -> tuple[Interval | None, list[str]]:
    """The interval of one conjunction (None: the conjunction never holds), and remarks."""
    some_row, exact, loosened = seen_by_some_row(case.atoms, context)
    begin, end, condition = solve(some_row, context.tile, context.orientation)
    if condition is sympy.false:
        return None, []
    diagnostics = []
    if _too_many(condition):
        diagnostics.append(
            f"{len(condition.args)} conditions on a tile are too many to ask, and left out"
        )
        condition = sympy.true
    diagnostics += [_why_opaque(part, context) for part in case.opaque]
    if not all(holds_range(case.atoms, part, context) for part in case.opaque):
        return Interval(begin, end, begin, begin, condition), diagnostics
    if loosened or not (exact or seen_without_gaps(case.atoms, context)):
        diagnostics.append(_why_too_wide(case, context))
    every_row = seen_by_every_row((certain(x, context.key_ranges) for x in case.atoms), context)
    full_begin, full_end, full_condition = solve(every_row, context.tile, context.orientation)
    if full_condition.has(sympy.Piecewise) or _too_many(full_condition):
        full_end = full_begin  # sympy would take a condition's choices apart
    elif full_condition is not sympy.true:
        full_end = sympy.Piecewise((full_end, full_condition), (full_begin, True), evaluate=False)
    return Interval(begin, end, full_begin, full_end, condition), diagnostics


def _too_many(condition: Any) -> bool:
    """Whether a condition has more parts than a kernel should evaluate for each tile."""
    return len(sympy.And.make_args(condition)) > MAX_CONDITIONS


def _hull(intervals: list[Interval], context: Context) -> Interval:
    """One interval around all of them; the full keys of the first stand for all."""
    first, *others = intervals
    begin, end = first.begin, first.end
    for other in others:
        begin = most(sympy.Min, begin, other.begin, context.tile)
        end = most(sympy.Max, end, other.end, context.tile)
    return Interval(begin, end, first.full_begin, first.full_end)


def _can_be_empty(cases: list[Conjunction], predicate: Predicate, context: Context) -> bool:
    """Whether some row may see no key, for ids in any order."""
    if not _every_row_sees_a_key(cases, context):
        return True
    if context.predicate.unordered is sympy.false and not context.hides(context.predicate.expr):
        return False
    # The proof assumes that ids are sorted and that no id is hidden. Otherwise the proof is that
    # each row sees the key at its own position.
    alone = predicate.expr.xreplace({context.orientation.solved: context.orientation.tile})
    return not (predicate.equal_lengths and alone.doit() == True)  # noqa: E712


def _every_row_sees_a_key(cases: list[Conjunction], context: Context) -> bool:
    """Whether each row sees some key: its conjunctions' projections onto q_idx cover all rows.

    Projecting a conjunction along kv_idx in [0, kv_len) gives the rows that see a key through it.
    A row outside all of them breaks an atom of each: refuting that is the proof.
    """
    clauses = []
    solved, keys = (
        context.orientation.solved,
        within(context.orientation.solved, context.orientation.solved_len),
    )
    for case in cases:
        rows, doubts = eliminate((*case.atoms, *keys), solved)
        if not (doubts or case.opaque):
            clauses.append(tuple(a.negated() for a in independent(rows, context.element)))
    return context.element.refutes(tuple(clauses))


# Diagnostics: the messages about parts of a mask that the bounds do not follow exactly.


def _why_opaque(part: Any, context: Context) -> str:
    """Why a condition takes no part in the bounds."""
    shown = plain_source(part)
    elements = sorted(part.atoms(Load), key=str)
    if not elements:
        return f"not affine in q_idx and kv_idx: {shown}"
    names = ", ".join(dict.fromkeys(str(element.args[0]) for element in elements))
    if part in context.key_ranges:
        return f"all between the first and the last that {names} shows are visited: {shown}"
    if block_table(part, context.declarations):
        return f"the tiles to visit are listed once a call, by the blocks of {names}: {shown}"
    if _could_be_sorted(part, context):
        return f"if {names} never falls, declare it with sorted=True to have bounds from: {shown}"
    return f"only the elements of {names} tell: {shown}"


def _could_be_sorted(part: Any, context: Context) -> bool:
    """Whether a condition compares two elements, as ``doc[b, q_idx] == doc[b, kv_idx]`` does."""
    if not all(isinstance(side, Load) for side in part.args):
        return False
    positions = {context.orientation.tile, context.orientation.solved}
    whole = all(not context.declarations.is_condition(side.args[0]) for side in part.args)
    return whole and all(
        [i for i in side.args[1:] if positions & i.free_symbols] == [side.args[-1]]
        for side in part.args
    )


def _why_too_wide(case: Conjunction, context: Context) -> str:
    """Why an interval may hold keys that no row of the tile sees, or rows without keys in it."""
    sources = context.read.sources
    found = [sources[atom] for atom in case.atoms if atom in sources]
    parts = dict.fromkeys(context.origins.get(part, part) for part in found)
    shown = " & ".join(f"({plain_source(part)})" for part in parts)
    if context.orientation == ROWS_OF_KEYS:
        return f"queries between those that see keys of one tile are visited too: {shown}"
    return f"keys between those that rows of one tile see are visited too: {shown}"
