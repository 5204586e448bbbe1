"""Tile bounds against brute force over the whole matrix, for random masks, lengths and tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import HealthCheck, given, settings

from flashgen import Int, Mask, causal, full, kv_len, q_len, sliding_window
from flashgen.expr import bound
from flashgen.symbolic import TileBounds, derive_bounds, trace
from flashgen.symbols import KV_LEN, Q_FIRST, Q_LAST, evaluate

LEFT = Int("left", 3)
RIGHT = Int("right", 2, min=0)
ANYWHERE = Int("anywhere", 0, min=-8)

q_first, q_last = Q_FIRST, Q_LAST
left, right = LEFT.sym, RIGHT.sym


def bounds_of(mask: Mask) -> TileBounds:
    return derive_bounds(trace(mask))


def matrix(mask: Mask, q: int, kv: int, params: dict[str, int]) -> list[list[bool]]:
    """The mask's own function on numbers: independent of everything derived."""
    with bound({**params, "q_len": q, "kv_len": kv}):
        return [[bool(mask.mask_mod(0, 0, i, j)) for j in range(kv)] for i in range(q)]


@dataclass(frozen=True)
class Visit:
    """The key tiles that a tile of rows visits, and those of them that it does not mask."""

    visited: set[int]
    unmasked: set[int]


def visit(bounds: TileBounds, block_n: int, values: dict[str, int]) -> Visit:
    """What a kernel does with the intervals."""
    visited: set[int] = set()
    unmasked: set[int] = set()
    for interval in bounds.intervals:
        if not evaluate(interval.condition, values):
            continue
        begin, end, full_begin, full_end = (
            evaluate(e, values)
            for e in (interval.begin, interval.end, interval.full_begin, interval.full_end)
        )
        for edge in (begin, end, full_begin, full_end):
            assert 0 <= edge <= values["kv_len"], (interval, values)
        if begin < end:
            visited |= set(range(begin // block_n, -(-end // block_n)))
        unmasked |= set(range(-(-full_begin // block_n), full_end // block_n))
    return Visit(visited, unmasked)


def check(mask: Mask, q: int, kv: int, block_m: int, block_n: int, params: dict[str, int]) -> None:
    """Every claim of the bounds, over every tile."""
    bounds = bounds_of(mask)
    seen = matrix(mask, q, kv, params)
    if not bounds.rows_can_be_empty:
        assert all(any(row) for row in seen), "a row is empty"
    for first in range(0, q, block_m):
        rows = seen[first : first + block_m]
        values = {**params, "q_len": q, "kv_len": kv, "q_first": first}
        values["q_last"] = first + len(rows) - 1
        found = visit(bounds, block_n, values)
        tiles = [range(n, min(n + block_n, kv)) for n in range(0, kv, block_n)]
        needed = {n for n, tile in enumerate(tiles) if any(row[j] for row in rows for j in tile)}
        whole = {
            n
            for n, tile in enumerate(tiles)
            if len(tile) == block_n and all(row[j] for row in rows for j in tile)
        }
        assert needed <= found.visited, "a visible element is skipped"
        assert found.unmasked <= whole, "a masked element is not masked"
        if bounds.exact:
            assert found.visited == needed, "a tile is visited for nothing"
            if len(bounds.intervals) == 1 and is_conjunction(mask):
                assert found.unmasked == whole, "a tile is masked for nothing"


def is_conjunction(mask: Mask) -> bool:
    expr = trace(mask).expr
    return not expr.has(sympy.Or) and not expr.has(sympy.Ne)


WIDTHS = st.one_of(st.integers(0, 9), st.sampled_from([LEFT, RIGHT, ANYWHERE]))


@st.composite
def masks(draw: st.DrawFn, depth: int = 2) -> Mask:
    """full, causal and windows of every alignment, under & | ~ to a small depth."""
    align = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    kind = draw(st.sampled_from(["full", "causal", "window", "and", "or", "not"]))
    if depth == 0 or kind in ("full", "causal", "window"):
        if kind == "full":
            return full()
        if kind == "causal":
            return causal(align=align)
        return sliding_window(draw(WIDTHS), draw(WIDTHS), align=align)
    inner = draw(masks(depth=depth - 1))
    if kind == "not":
        return ~inner
    other = draw(masks(depth=depth - 1))
    return inner & other if kind == "and" else inner | other


def affine_mask(terms: list[tuple[int, int, int, str]], joint: str) -> Mask:
    """Comparisons of ``a*q + c*kv`` with a constant, all or any of them."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        result = None
        for a, c, const, relation in terms:
            value = a * q + c * kv + const
            part = {">=": value >= 0, "<": value < 0, "==": value == 0, "!=": value != 0}[relation]
            joined = part if result is None else result & part if joint == "&" else result | part
            result = joined
        return result

    return Mask(mask_mod, "affine")


COEFFICIENTS = st.integers(-3, 3)
AFFINE = st.builds(
    affine_mask,
    st.lists(
        st.tuples(
            COEFFICIENTS,
            COEFFICIENTS,
            st.integers(-12, 12),
            st.sampled_from([">=", "<", "==", "!="]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from("&|"),
)
LENGTHS = st.integers(1, 40)
BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 16])
SWEEP = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@SWEEP
@given(masks(), LENGTHS, LENGTHS, BLOCKS, BLOCKS, st.integers(0, 45), st.integers(0, 9), st.data())
def test_every_combination_of_the_shipped_masks_is_exact(
    mask: Mask, q: int, kv: int, m: int, n: int, lft: int, rgt: int, data: st.DataObject
) -> None:
    assert bounds_of(mask).exact or len(bounds_of(mask).intervals) == 1
    kv = q if mask.equal_lengths else kv
    anywhere = data.draw(st.integers(-8, 45))
    check(mask, q, kv, m, n, {"left": lft, "right": rgt, "anywhere": anywhere})


@SWEEP
@given(AFFINE, LENGTHS, LENGTHS, BLOCKS, BLOCKS)
def test_any_affine_predicate_is_sound(mask: Mask, q: int, kv: int, m: int, n: int) -> None:
    check(mask, q, kv, m, n, {})
