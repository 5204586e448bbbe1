"""Tile bounds against brute force over the whole matrix, for random masks, lengths and tiles."""

from __future__ import annotations

import operator
import time
from functools import reduce
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import given

from flashgen import Int, Mask, causal, full, sliding_window
from flashgen.symbolic import derive_bounds, trace, triton_source
from support.visits import Call, bounds_of, check, is_conjunction, sweep

LEFT = Int("left", 3)
RIGHT = Int("right", 2, min=0)
ANYWHERE = Int("anywhere", 0, min=-8)


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
PARAMS = st.fixed_dictionaries(
    {
        "left": st.integers(0, 45),
        "right": st.integers(0, 9),
        "anywhere": st.integers(-8, 45),
    }
)


@sweep(300)
@given(masks(), LENGTHS, LENGTHS, BLOCKS, BLOCKS, PARAMS)
def test_every_combination_of_the_shipped_masks_is_exact(
    mask: Mask, q: int, kv: int, m: int, n: int, params: dict[str, int]
) -> None:
    bounds = bounds_of(mask)
    assert bounds.exact or "separate intervals" in bounds.diagnostics[0]
    call = Call(q, q if mask.equal_lengths else kv, m, n, params)
    check(mask, call, whole_tiles_too=bounds.exact and is_conjunction(mask))


@sweep(200)
@given(AFFINE, LENGTHS, LENGTHS, BLOCKS, BLOCKS)
def test_any_affine_predicate_is_sound(mask: Mask, q: int, kv: int, m: int, n: int) -> None:
    check(mask, Call(q, kv, m, n, {}))


LONG = Int("left", 1024)

DERIVED = [
    (full(), ("0", "kv_len", "0", "kv_len"), "even", False),
    (causal(), ("0", "q_last + 1", "0", "q_first + 1"), "last", False),
    (
        causal(align="top_left"),
        ("0", "min(kv_len, q_last + 1)", "0", "min(kv_len, q_first + 1)"),
        "last",
        False,
    ),
    (
        causal(align="bottom_right"),
        (
            "0",
            "max(0, q_last + kv_len - q_len + 1)",
            "0",
            "max(0, q_first + kv_len - q_len + 1)",
        ),
        "last",
        True,
    ),
    (
        sliding_window(LONG, 0),
        ("max(0, q_first - left)", "q_last + 1", "max(0, q_last - left)", "q_first + 1"),
        "last",
        False,
    ),
    (
        sliding_window(LONG, 7),
        (
            "max(0, q_first - left)",
            "min(kv_len, q_last + 8)",
            "max(0, q_last - left)",
            "min(kv_len, q_first + 8)",
        ),
        "even",
        False,
    ),
    (~causal(), ("q_first + 1", "kv_len", "q_last + 1", "kv_len"), "first", True),
]


@pytest.mark.parametrize(("mask", "expected", "longest", "empty"), DERIVED, ids=str)
def test_the_bounds_read_as_a_person_would_write_them(
    mask: Mask, expected: tuple[str, ...], longest: str, empty: bool
) -> None:
    bounds = bounds_of(mask)
    (interval,) = bounds.intervals
    assert tuple(triton_source(end) for end in interval.expressions[:4]) == expected
    assert interval.condition is sympy.true
    assert (bounds.longest_first, bounds.rows_can_be_empty) == (longest, empty)
    assert bounds.exact and bounds.diagnostics == ()


def test_a_causal_window_is_a_window_and_a_window_beside_causal_is_causal() -> None:
    window = sliding_window(LONG, 0)
    assert bounds_of(causal() & window) == bounds_of(window)
    assert bounds_of(causal() | window) == bounds_of(causal())
    assert bounds_of(causal() & sliding_window(LONG, 5)) == bounds_of(window)


def test_windows_that_touch_become_one() -> None:
    assert bounds_of(sliding_window(3, 0) | sliding_window(-1, 5)) == bounds_of(
        sliding_window(3, 5)
    )


@pytest.mark.parametrize("mask", [causal() | ~causal(), full() | causal(), ~~full()], ids=str)
def test_a_mask_that_hides_nothing_is_full(mask: Mask) -> None:
    assert bounds_of(mask).intervals == bounds_of(full()).intervals
    assert not bounds_of(mask).rows_can_be_empty


@pytest.mark.parametrize(
    "mask", [~full(), causal() & ~causal(), sliding_window(-3, 4) & causal()], ids=str
)
def test_a_mask_that_hides_everything_visits_nothing(mask: Mask) -> None:
    bounds = bounds_of(mask)
    (interval,) = bounds.intervals
    assert interval.expressions[:4] == (0, 0, 0, 0)
    assert bounds.rows_can_be_empty


def test_the_two_sides_of_a_window_come_in_order() -> None:
    bounds = bounds_of(~sliding_window(4, 0))
    before, after = bounds.intervals
    assert [triton_source(e) for e in before.expressions[:4]] == [
        "0", "max(0, q_last - 4)", "0", "max(0, q_first - 4)",
    ]  # fmt: skip
    assert [triton_source(e) for e in after.expressions[:4]] == [
        "q_first + 1", "kv_len", "q_last + 1", "kv_len",
    ]  # fmt: skip
    assert bounds.sorted


def test_a_prefix_joins_the_causal_part() -> None:
    mask = Mask(lambda b, h, q, kv: (kv <= q) | (kv < LONG), "prefix")
    (interval,) = bounds_of(mask).intervals
    assert triton_source(interval.end) == "min(kv_len, max(left, q_last + 1))"
    assert triton_source(interval.full_end) == "min(kv_len, max(left, q_first + 1))"


def test_what_depends_on_the_rows_alone_becomes_a_condition() -> None:
    mask = Mask(lambda b, h, q, kv: (q >= 5) & (kv <= q), "late rows")
    (interval,) = bounds_of(mask).intervals
    assert triton_source(interval.condition) == "q_last >= 5"
    assert triton_source(interval.full_end) == "tl.where(q_first >= 5, min(kv_len, q_first + 1), 0)"


def test_a_condition_on_the_parameters_alone_is_kept() -> None:
    mask = Mask(lambda b, h, q, kv: (kv <= q) & (LONG > 3), "switch")
    (interval,) = bounds_of(mask).intervals
    assert triton_source(interval.condition) == "left >= 4"
    assert bounds_of(mask).rows_can_be_empty


def test_the_promise_of_a_minimum_decides_whether_rows_can_be_empty() -> None:
    def mask(width: Int) -> Mask:
        return Mask(lambda b, h, q, kv: (kv <= q) & (q - kv < width), "width")

    assert bounds_of(mask(Int("width", 4))).rows_can_be_empty
    top_left = mask(Int("width", 4, min=1)) | causal(align="top_left")
    assert not bounds_of(top_left).rows_can_be_empty
    assert not bounds_of(mask(Int("width", 4, min=1)) & causal()).rows_can_be_empty


def test_a_row_between_two_keys_is_empty_though_no_rational_row_is() -> None:
    mask = Mask(lambda b, h, q, kv: 2 * kv == q, "even rows", equal_lengths=True)
    assert bounds_of(mask).rows_can_be_empty


def test_coefficients_that_divide_round_to_whole_keys() -> None:
    (interval,) = bounds_of(Mask(lambda b, h, q, kv: 2 * q >= 3 * kv, "slope")).intervals
    assert triton_source(interval.end) == "min(kv_len, (2 * q_last) // 3 + 1)"


def test_what_is_not_affine_falls_back_to_a_hull_and_says_so() -> None:
    mask = Mask(lambda b, h, q, kv: ((q - kv) % 3 == 0) & (kv <= q), "dilated")
    bounds = bounds_of(mask)
    (interval,) = bounds.intervals
    assert not bounds.exact
    assert bounds.diagnostics == ("not affine in q_idx and kv_idx: (q_idx - kv_idx) % 3 == 0",)
    assert triton_source(interval.end) == "min(kv_len, q_last + 1)"
    assert interval.full_begin == interval.full_end == interval.begin


def test_many_intervals_become_one_around_them() -> None:
    stripes = [sliding_window(-10 * i, 10 * i + 3) for i in range(1, 7)]
    bounds = bounds_of(reduce(operator.or_, stripes))
    assert len(bounds.intervals) == 1
    assert bounds.diagnostics == ("6 separate intervals: replaced by the one around them all",)
    check(reduce(operator.or_, stripes), Call(40, 40, 4, 4, {}))


def test_a_predicate_with_very_many_cases_is_still_sound() -> None:
    holes = [~sliding_window(-5 * i, 5 * i + 1) for i in range(1, 8)]
    check(reduce(operator.and_, holes), Call(40, 40, 4, 4, {}))


def test_bounds_only_mention_what_the_predicate_does() -> None:
    mask = sliding_window(LONG, 0, align="bottom_right") | causal(align="top_left")
    allowed = {s.name for s in trace(mask).expr.free_symbols} | {"q_first", "q_last", "kv_len"}
    for interval in bounds_of(mask).intervals:
        for end in interval.expressions[:4]:
            assert {s.name for s in end.free_symbols} <= allowed


def test_lowering_a_mask_takes_a_moment() -> None:
    mask = sliding_window(LONG, Int("right"), align="bottom_right") | ~causal(align="top_left")
    bounds_of(mask)
    start = time.process_time()
    derive_bounds.__wrapped__(trace(mask))  # what was derived before is kept
    assert time.process_time() - start < 0.5
