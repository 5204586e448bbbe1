"""The tiles that bounds visit, beside the tiles that a mask needs: brute force on numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import sympy
from hypothesis import HealthCheck, settings

from flashgen import Mask
from flashgen.symbolic import (
    RangeTable,
    RowTable,
    TileBounds,
    derive_bounds,
    derive_q_bounds,
    trace,
    triton_source,
    with_row_tables,
)
from flashgen.symbols import evaluate
from flashgen.tracing.expr import bound
from support.turns import is_full


def sweep(examples: int) -> settings:
    """Settings for so many examples, the same ones in every run; a fast run has a third of them."""
    examples = examples if is_full() else -(-examples // 3)
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=slow, derandomize=True
    )


def bounds_of(mask: Mask) -> TileBounds:
    return derive_bounds(trace(mask))


def q_bounds_of(mask: Mask) -> TileBounds:
    return derive_q_bounds(trace(mask))


def source(bounds: TileBounds) -> list[tuple[str, ...]]:
    """Begin, end, full_begin and full_end of each interval, as a kernel prints them."""
    return [tuple(map(triton_source, interval.expressions[:4])) for interval in bounds.intervals]


def only(bounds: TileBounds) -> tuple[str, ...]:
    """The source of the one interval there is, which exists in every tile."""
    (interval,) = bounds.intervals
    assert interval.condition is sympy.true
    return source(bounds)[0]


class Elements:
    """A tensor for brute force: indexed by a tuple, 0 outside, as a kernel reads it."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, indices: tuple[int, ...]) -> Any:
        rows = self.rows
        for index in indices:
            if not 0 <= index < len(rows):
                return 0
            rows = rows[index]
        return rows


def row_table(table: RowTable, values: Mapping[str, Any]) -> Elements:
    """What the launcher makes: each value's place among the keys; or that they are in order."""
    if table.side == "unordered":
        return Elements([[0]] if len(table.values.dims) == 2 else [0])
    find = bisect_left if table.side == "left" else bisect_right

    def looked_up(keys: Any, wanted: Any) -> Any:
        if wanted and isinstance(wanted[0], list):
            return [looked_up(k, w) for k, w in zip(keys, wanted, strict=True)]
        other = bisect_right if table.side == "left" else bisect_left
        return [(other if x == table.hidden else find)(keys, x) for x in wanted]

    return Elements(looked_up(values[table.keys.name].rows, values[table.values.name].rows))


def range_table(table: RangeTable, values: Mapping[str, Any]) -> Elements:
    """What the launcher makes: the ends of what a condition shows, and of a run of it."""

    def found(row: Any) -> list[Any]:
        if row and isinstance(row[0], list):
            return list(map(found, row))
        shown = [(table.low <= x <= table.high) != table.but for x in row]
        if not any(shown):
            return [len(row), 0, len(row), 0]
        first, end = shown.index(True), len(row) - shown[::-1].index(True)
        inside = shown[first:end]
        gap = first + inside.index(False) if False in inside else end
        last_gap = end - inside[::-1].index(False) if False in inside else first
        run = (last_gap, end) if end - last_gap > gap - first else (first, gap)
        return [first, end, *run]

    return Elements(found(values[table.keys.name].rows))


@dataclass(frozen=True)
class Call:
    """One call: lengths, tile sizes, and a value for each parameter by name."""

    q: int
    kv: int
    block_m: int
    block_n: int
    params: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        return {**self.params, "q_len": self.q, "kv_len": self.kv, "b": 0, "h": 0}

    def matrix(self, mask: Mask) -> list[list[bool]]:
        """The mask's own function on numbers: independent of everything derived."""
        with bound(self.values):
            return [
                [bool(mask.mask_mod(0, 0, i, j)) for j in range(self.kv)] for i in range(self.q)
            ]

    def tables(
        self, tables: Iterable[RowTable], ranges: Iterable[RangeTable] = ()
    ) -> dict[str, Any]:
        made = {table.name: row_table(table, self.params) for table in tables}
        return made | {table.name: range_table(table, self.params) for table in ranges}


@dataclass(frozen=True)
class Visit:
    """The key tiles that a tile of rows visits, and those of them that it does not mask."""

    visited: set[int]
    unmasked: set[int]


def visit(bounds: TileBounds, block: int, length: int, values: Mapping[str, Any]) -> Visit:
    """What a kernel does with the intervals."""
    visited: set[int] = set()
    unmasked: set[int] = set()
    begins = [evaluate(interval.begin, values) for interval in bounds.intervals]
    assert not bounds.sorted or all(a <= b for a, b in pairwise(begins))
    for interval in bounds.intervals:
        *edges, holds = (evaluate(e, values) for e in interval.expressions)
        assert all(0 <= edge <= length for edge in edges), (interval, values)
        begin, end, full_begin, full_end = edges
        assert not interval.nonempty or (holds and begin < end)
        if not holds:
            continue
        if begin < end:
            visited |= set(range(begin // block, -(-end // block)))
        unmasked |= set(range(-(-full_begin // block), full_end // block))
    return Visit(visited, unmasked)


def check(mask: Mask, call: Call, whole_tiles_too: bool = False, ranges: bool = False) -> None:
    """Every claim of the bounds, of rows and of keys, over every tile.

    Args:
        mask: what is seen.
        call: the numbers.
        whole_tiles_too: also that no tile is masked for nothing.
        ranges: with range tables.
    """
    predicate, seen = trace(mask), call.matrix(mask)
    rewritten = with_row_tables(predicate)
    values = {**call.values, **call.tables(rewritten.tables)}
    for i, j in product(range(call.q), range(call.kv)) if rewritten.tables else ():
        said = evaluate(rewritten.expr, {**values, "q_idx": i, "kv_idx": j})
        assert said == seen[i][j], (i, j, rewritten.expr)
    options = {"ranges": True} if ranges else {}
    keys_of_rows = derive_bounds(predicate, **options)
    _check(keys_of_rows, seen, ("q", call.q, call.block_m), (call.kv, call.block_n), call)
    if whole_tiles_too:
        assert keys_of_rows.exact
        _check_whole(keys_of_rows, seen, call)
    seen_by_key = [[row[j] for row in seen] for j in range(call.kv)]
    rows_of_keys = derive_q_bounds(predicate, **options)
    _check(rows_of_keys, seen_by_key, ("kv", call.kv, call.block_n), (call.q, call.block_m), call)


def _check(
    bounds: TileBounds,
    seen: list[list[bool]],
    tiled: tuple[str, int, int],
    solved: tuple[int, int],
    call: Call,
) -> None:
    (name, count, block), (length, width) = tiled, solved
    if not bounds.rows_can_be_empty:
        assert all(any(row) for row in seen), f"nothing is seen by one {name}"
    for first in range(0, count, block):
        rows = seen[first : first + block]
        tables = call.tables(bounds.tables, bounds.ranges)
        values = {**call.values, **tables, f"{name}_first": first}
        values[f"{name}_last"] = first + len(rows) - 1
        found = visit(bounds, width, length, values)
        needed = {j // width for row in rows for j in range(length) if row[j]}
        assert needed <= found.visited, f"a visible element is skipped: {name} {first}"
        for n in found.unmasked:
            tile = range(n * width, n * width + width)
            assert all(row[j] for row in rows for j in tile), f"an element is not masked: {first}"
        if bounds.exact:
            assert found.visited == needed, f"a tile is visited for nothing: {name} {first}"


def _check_whole(bounds: TileBounds, seen: list[list[bool]], call: Call) -> None:
    for first in range(0, call.q, call.block_m):
        rows = seen[first : first + call.block_m]
        values = {**call.values, **call.tables(bounds.tables, bounds.ranges), "q_first": first}
        values["q_last"] = first + len(rows) - 1
        found = visit(bounds, call.block_n, call.kv, values)
        for n in range(call.kv // call.block_n):
            tile = range(n * call.block_n, n * call.block_n + call.block_n)
            whole = all(row[j] for row in rows for j in tile)
            assert not whole or n in found.unmasked, f"a tile is masked for nothing: {first}"


def is_conjunction(mask: Mask) -> bool:
    expr = trace(mask).expr
    return not expr.has(sympy.Or) and not expr.has(sympy.Ne)
