"""excess_of_bounds: how many tiles bounds visit for each one that a mask needs, on numbers.

Bounds of a tile are a few ranges. Where a mask shows keys in many places, as windows in a video do,
one range lies around them all, and only a count tells what it costs: a window of 13 in rows of 64
pixels costs nothing, because no tile of 128 keys lies between its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy

from flashgen.params import Float, Int
from flashgen.plan.typical import typical_number
from flashgen.symbolic.bounds import TileBounds, derive_bounds, derive_q_bounds
from flashgen.symbolic.logic import negation_normal_form
from flashgen.symbolic.tile_answers import TILE, OfTile, TileAnswers, tile_answers
from flashgen.symbolic.trace import KEYS_OF_ROWS, ROWS_OF_KEYS, Orientation, Predicate
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import KV_IDX, Q_IDX, Load, evaluate

#: Queries and keys of the call that is counted.
LENGTH = 4096

#: Queries and keys of its tiles.
BLOCK = 128

#: Bounds that visit more than this for each tile that is needed are too wide.
MOST = 1.05


@dataclass(frozen=True)
class Excess:
    """Tiles visited, over tiles that may hold a visible pair.

    Attributes:
        of_keys: by tiles of queries.
        of_queries: by tiles of keys, for gradients of keys and values.
    """

    of_keys: float
    of_queries: float

    @property
    def too_wide(self) -> bool:
        """Whether deciding tiles, which costs some microseconds a call, is worth it."""
        return max(self.of_keys, self.of_queries) > MOST

    def __str__(self) -> str:
        return f"{self.of_keys:.2f} (for gradients {self.of_queries:.2f}) times"


@lru_cache(maxsize=1024)  # a build asks for the same one at several steps, of every spec
def excess_of_bounds(predicate: Predicate) -> Excess:
    """Counted at `LENGTH` tokens with typical numbers, as if all conditions on data held."""
    bounds = [derive(predicate) for derive in (derive_bounds, derive_q_bounds)]
    if all(x.exact for x in bounds):
        return Excess(1.0, 1.0)
    fixed = _without_data(negation_normal_form(predicate.expr))
    if fixed != predicate.expr:
        predicate = replace(predicate, expr=fixed)
        bounds = [derive(predicate) for derive in (derive_bounds, derive_q_bounds)]
    values: dict[str, Any] = {
        p.name: typical_number(p) for p in predicate.params if isinstance(p, Int | Float)
    }
    values |= {"q_len": LENGTH, "kv_len": LENGTH, "b": 0, "h": 0}
    # No block is one number here: what differs between rows and tiles of keys is slow to count.
    needed = max(1, _needed(tile_answers(predicate, 2 * LENGTH), values))
    return Excess(
        _visited(bounds[0], KEYS_OF_ROWS, values) / needed,
        _visited(bounds[1], ROWS_OF_KEYS, values) / needed,
    )


def _without_data(expr: Any) -> Any:
    """A condition in negation normal form as if all its conditions on tensors held."""
    if isinstance(expr, sympy.And | sympy.Or):
        return expr.func(*map(_without_data, expr.args))
    return sympy.true if expr.has(Load) else expr


def _visited(bounds: TileBounds, orientation: Orientation, values: Mapping[str, Any]) -> int:
    total = 0
    for first in range(0, LENGTH, BLOCK):
        ends = {str(orientation.first): first, str(orientation.last): first + BLOCK - 1}
        visited: set[int] = set()
        for run in bounds.intervals:
            begin, end, _, _, holds = (evaluate(x, {**values, **ends}) for x in run.expressions)
            if holds and begin < end:
                visited |= set(range(begin // BLOCK, -(-end // BLOCK)))
        total += len(visited)
    return total


def _needed(answers: TileAnswers, values: Mapping[str, Any]) -> int:
    """The tiles that consist of `TILE` queries and keys each, some of which may be visible."""
    firsts = range(0, LENGTH, TILE)
    of_rows, of_keys = (
        {first: _reads(answers.reads, axes, first, values) for first in firsts}
        for axes in (Axes.ROW, Axes.COLUMN)
    )
    needed: set[tuple[int, int]] = set()
    for q_first in firsts:
        known = {**values, **of_rows[q_first]}
        for kv_first in firsts:
            tile = q_first // BLOCK, kv_first // BLOCK
            known |= of_keys[kv_first]  # the same names each time
            if tile not in needed and evaluate(answers.seen, known):
                needed.add(tile)
    return len(needed)


def _reads(
    reads: tuple[OfTile, ...], axes: Axes, first: int, values: Mapping[str, Any]
) -> dict[str, Any]:
    """What a kernel computes of a tile's rows, or of its keys."""
    side, position = ("q", Q_IDX) if axes == Axes.ROW else ("kv", KV_IDX)
    found: dict[str, Any] = {f"{side}_first": first, f"{side}_last": first + TILE - 1}
    for read in reads:
        if read.over == axes:
            of_all = [
                evaluate(read.expr, {**values, position.name: i})
                for i in range(first, first + TILE)
            ]
            least, most = (any, all) if read.is_condition else (min, max)
            found |= {read.ends[0].name: least(of_all), read.ends[1].name: most(of_all)}
    return found
