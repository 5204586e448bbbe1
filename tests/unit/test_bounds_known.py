"""Bounds of blocks, gathers, choices and the like, as a person would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen import Float, Int, Mask, Tensor, causal, clamp, kv_len, maximum, q_len, where
from flashgen.symbolic import TileBounds, torch_source, trace, triton_source, with_row_tables
from support.visits import bounds_of, only, source

CHUNK, WIDTH = Int("chunk", min=1), Int("width", min=1)
HEIGHT, RADIUS, LEFT = Int("height", min=1), Int("radius"), Int("left")
DOC = Tensor("doc", ("batch", "kv_len"), "int32", sorted=True)
ANY_DOC = Tensor("doc", ("batch", "kv_len"), "int32")
Q_DOC = Tensor("q_doc", ("batch", "q_len"), "int32", sorted=True)
PREFIX = Tensor("prefix", ("batch",), "int32")
ENDS = Tensor("ends", ("batch", "q_len"), "int32")
TABLE = Tensor("table", ("num_q_heads", None, 3), "int32")
SLOPES = Tensor("slopes", ("num_q_heads",), "float32")
VALID = Tensor("valid", ("batch", "q_len"), "bool")

MaskMod = Callable[[Any, Any, Any, Any], Any]


def of_equal_lengths(mask_mod: MaskMod) -> TileBounds:
    return bounds_of(Mask(mask_mod, "mask", equal_lengths=True))


def of_any_lengths(mask_mod: MaskMod) -> TileBounds:
    return bounds_of(Mask(mask_mod, "mask"))


EXACT: list[tuple[MaskMod, tuple[str, ...], str, bool]] = [
    (
        lambda b, h, q, kv: (q // 64 == kv // 64) & (kv <= q),
        ("64 * (q_first // 64)", "q_last + 1", "64 * (q_last // 64)", "q_first + 1"),
        "even",
        False,
    ),
    (
        lambda b, h, q, kv: (q // CHUNK == kv // CHUNK) & (kv <= q),
        (
            "(q_first // chunk) * chunk",
            "q_last + 1",
            "(q_last // chunk) * chunk",
            "q_first + 1",
        ),
        "even",
        False,
    ),
    (
        lambda b, h, q, kv: q // CHUNK >= kv // CHUNK,
        (
            "0",
            "min(kv_len, (q_last // chunk) * chunk + chunk)",
            "0",
            "min(kv_len, (q_first // chunk) * chunk + chunk)",
        ),
        "last",
        False,
    ),
    (
        lambda b, h, q, kv: (q // CHUNK - kv // CHUNK <= 1) & (kv <= q),
        (
            "max(0, (q_first // chunk) * chunk - chunk)",
            "q_last + 1",
            "max(0, (q_last // chunk) * chunk - chunk)",
            "q_first + 1",
        ),
        "last",
        False,
    ),
    (
        lambda b, h, q, kv: abs(q // 32 - kv // 32) <= 2,
        (
            "max(0, 32 * (q_first // 32) - 64)",
            "min(kv_len, 32 * (q_last // 32) + 96)",
            "max(0, 32 * (q_last // 32) - 64)",
            "min(kv_len, 32 * (q_first // 32) + 96)",
        ),
        "even",
        False,
    ),
    (
        lambda b, h, q, kv: (DOC[b, q] == DOC[b, kv]) & (kv <= q),
        (
            "_at_2d(doc_begin, b, q_first)",
            "q_last + 1",
            "_at_2d(doc_begin, b, q_last)",
            "q_first + 1",
        ),
        "even",
        False,
    ),
    (
        lambda b, h, q, kv: DOC[b, q] == DOC[b, kv],
        (
            "_at_2d(doc_begin, b, q_first)",
            "_at_2d(doc_end, b, q_last)",
            "_at_2d(doc_begin, b, q_last)",
            "_at_2d(doc_end, b, q_first)",
        ),
        "even",
        False,
    ),
    (
        lambda b, h, q, kv: (kv <= q) | (kv < PREFIX[b]),
        (
            "0",
            "max(q_last + 1, min(kv_len, _at_1d(prefix, b)))",
            "0",
            "max(q_first + 1, min(kv_len, _at_1d(prefix, b)))",
        ),
        "last",
        False,
    ),
    (
        lambda b, h, q, kv: (kv <= q) & (q - kv < where(h < 4, 128, 1024)),
        (
            "max(0, q_first - tl.where(h < 4, 128, 1024) + 1)",
            "q_last + 1",
            "max(0, q_last - tl.where(h < 4, 128, 1024) + 1)",
            "q_first + 1",
        ),
        "last",
        False,
    ),
    (
        lambda b, h, q, kv: abs(clamp(q // 32, 3, 28) - kv // 32) <= 3,
        (
            "min(kv_len, max(0, 32 * min(28, max(3, q_first // 32)) - 96))",
            "min(kv_len, 32 * min(28, max(3, q_last // 32)) + 128)",
            "min(kv_len, max(0, 32 * min(28, max(3, q_last // 32)) - 96))",
            "min(kv_len, 32 * min(28, max(3, q_first // 32)) + 128)",
        ),
        "even",
        True,  # an image of fewer rows
    ),
    (
        lambda b, h, q, kv: kv < q + ENDS[b, q],
        (
            "0",
            "max(0, min(kv_len, tl.max(_at_2d(ends, b, q_rows) + q_rows, 0)))",
            "0",
            "max(0, min(kv_len, tl.min(_at_2d(ends, b, q_rows) + q_rows, 0)))",
        ),
        "even",
        True,
    ),
]


@pytest.mark.parametrize(("mask_mod", "expected", "longest", "empty"), EXACT)
def test_exact_bounds(
    mask_mod: MaskMod, expected: tuple[str, ...], longest: str, empty: bool
) -> None:
    bounds = of_equal_lengths(mask_mod)
    assert only(bounds) == expected
    assert (bounds.longest_first, bounds.rows_can_be_empty) == (longest, empty)
    assert bounds.exact and bounds.diagnostics == ()


def test_rows_of_a_neighborhood_are_exact_and_its_columns_are_not() -> None:
    def rows(q: Any, kv: Any) -> Any:
        return abs(clamp(q // WIDTH, RADIUS, HEIGHT - 1 - RADIUS) - kv // WIDTH) <= RADIUS

    def columns(q: Any, kv: Any) -> Any:
        return abs(clamp(q % WIDTH, RADIUS, WIDTH - 1 - RADIUS) - kv % WIDTH) <= RADIUS

    bounds = of_equal_lengths(lambda b, h, q, kv: rows(q, kv))
    center = "min(max(radius, q_{} // width), height - radius - 1) * width"
    first, last = center.format("first"), center.format("last")
    assert only(bounds)[:2] == (
        f"min(kv_len, max(0, {first} - radius * width))",
        f"max(0, min(kv_len, {last} + radius * width + width))",
    )
    assert bounds.exact
    both = of_equal_lengths(lambda b, h, q, kv: rows(q, kv) & columns(q, kv))
    assert only(both)[:2] == only(bounds)[:2]
    assert both.diagnostics == (
        "not affine in q_idx and kv_idx: radius >= abs(kv_idx % width - "
        "min(max(radius, q_idx % width), width - radius - 1))",
    )


def test_the_sides_of_a_chunk() -> None:
    bounds = of_any_lengths(lambda b, h, q, kv: q // CHUNK != kv // CHUNK)
    assert [(begin, end) for begin, end, *_ in source(bounds)] == [
        ("0", "min(kv_len, (q_last // chunk) * chunk)"),
        ("min(kv_len, (q_first // chunk) * chunk + chunk)", "kv_len"),
    ]
    assert bounds.exact and bounds.sorted and bounds.rows_can_be_empty


def test_sinks_beside_a_window_are_two_intervals() -> None:
    bounds = of_equal_lengths(lambda b, h, q, kv: (kv <= q) & ((kv < 4) | (q - kv <= LEFT)))
    assert source(bounds) == [
        ("0", "min(4, q_last + 1)", "0", "min(4, q_first + 1)"),
        ("max(0, q_first - left)", "q_last + 1", "max(0, q_last - left)", "q_first + 1"),
    ]
    assert bounds.exact and not bounds.rows_can_be_empty


def test_documents_that_end_with_the_keys_read_inside_the_table() -> None:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = q + kv_len - q_len
        return (DOC[b, at] == DOC[b, kv]) & (kv <= at)

    bounds = of_any_lengths(mask_mod)
    assert only(bounds)[:2] == (
        "_at_2d(doc_begin, b, max(0, q_first + kv_len - q_len))",
        "max(0, q_last + kv_len - q_len + 1)",
    )
    assert bounds.exact
    assert bounds.rows_can_be_empty  # before the first key


HULLS: list[tuple[MaskMod, str]] = [
    (
        lambda b, h, q, kv: ANY_DOC[b, q] == ANY_DOC[b, kv],
        "if doc never falls, declare it with sorted=True to have bounds from: "
        "doc[b, q_idx] == doc[b, kv_idx]",
    ),
    (
        lambda b, h, q, kv: kv // 64 == TABLE[h, q // 64, 1],
        "keys between those that rows of one tile see are visited too: "
        "(kv_idx // 64 == table[h, q_idx // 64, 1])",
    ),
    (
        lambda b, h, q, kv: Q_DOC[b, q] == DOC[b, kv],
        "keys between those that rows of one tile see are visited too: "
        "(q_doc[b, q_idx] == doc[b, kv_idx])",
    ),
    (
        lambda b, h, q, kv: (kv <= q) & ~VALID[b, kv],
        "only the elements of valid tell: valid[b, kv_idx] == 0",
    ),
]


@pytest.mark.parametrize(("mask_mod", "note"), HULLS)
def test_what_is_not_exact_is_said_in_the_users_words(mask_mod: MaskMod, note: str) -> None:
    bounds = of_equal_lengths(mask_mod)
    assert not bounds.exact
    assert bounds.diagnostics == (note,)


def test_a_block_of_keys_for_each_block_of_rows_lies_between_extremes() -> None:
    bounds = of_equal_lengths(lambda b, h, q, kv: kv // 64 == TABLE[h, q // 64, 1])
    least = "64 * tl.min(_at_3d(table, h, q_rows // 64, 1), 0)"
    greatest = "64 * tl.max(_at_3d(table, h, q_rows // 64, 1), 0)"
    assert only(bounds)[:2] == (
        f"min(kv_len, max(0, {least}))",
        f"max(0, min(kv_len, {greatest} + 64))",
    )


def test_a_number_of_a_head_decides_whether_an_interval_exists() -> None:
    threshold = Float("threshold")
    bounds = of_equal_lengths(lambda b, h, q, kv: (kv <= q) & (SLOPES[h] > threshold))
    (interval,) = bounds.intervals
    assert triton_source(interval.condition) == "threshold < _at_1d(slopes, h)"
    assert bounds.exact and bounds.rows_can_be_empty


def test_rows_without_a_flag_see_nothing() -> None:
    bounds = of_equal_lengths(lambda b, h, q, kv: VALID[b, q])
    (interval,) = bounds.intervals
    assert triton_source(interval.condition) == "tl.max(_at_2d(valid, b, q_rows), 0) >= 1"
    assert bounds.exact and bounds.rows_can_be_empty


def test_a_remainder_of_rows_is_what_it_is() -> None:
    """``q % d`` is ``q - d * (q // d)``: with the quotient it is the row again."""
    bounds = of_equal_lengths(lambda b, h, q, kv: kv <= CHUNK * (q // CHUNK) + q % CHUNK)
    assert bounds == bounds_of(causal())


def test_quotients_take_whole_multiples_out() -> None:
    shifted = of_any_lengths(lambda b, h, q, kv: (q + 2 * CHUNK) // CHUNK == kv // CHUNK + 2)
    assert shifted == of_any_lengths(lambda b, h, q, kv: q // CHUNK == kv // CHUNK)


def test_a_maximum_of_bounds_is_one_interval() -> None:
    prefix = of_any_lengths(lambda b, h, q, kv: kv < maximum(q + 1, LEFT))
    assert only(prefix)[:2] == ("0", "min(kv_len, max(left, q_last + 1))")


def test_a_comparison_shows_nothing_outside_of_a_tensor() -> None:
    """Where ids below zero would compare with the 0 that a kernel reads there."""
    mask = Mask(lambda b, h, q, kv: DOC[b, q - 3] <= DOC[b, kv], "later", equal_lengths=True)
    shown = with_row_tables(trace(mask)).expr
    assert torch_source(shown) == "(q_idx - 3 >= 0) & (kv_idx >= doc_begin[b, q_idx - 3])"
    begin = "_at_2d(doc_begin, b, max(0, q_first - 3))"
    assert source(bounds_of(mask))[0][:2] == (begin, "kv_len")


def test_block_diffusion_as_its_authors_wrote_it() -> None:
    """Noised tokens before clean ones: three clauses, of which each is bounded by itself."""

    def block_diffusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
        clean_q, clean_kv = q >= WIDTH, kv >= WIDTH
        block_q = where(clean_q, (q - WIDTH) // CHUNK, q // CHUNK)
        block_kv = where(clean_kv, (kv - WIDTH) // CHUNK, kv // CHUNK)
        diagonal = (block_q == block_kv) & (clean_q == clean_kv)
        offset = (block_q > block_kv) & clean_kv & ~clean_q
        return diagonal | offset | ((block_q >= block_kv) & clean_kv & clean_q)

    bounds = of_any_lengths(block_diffusion)
    assert len(bounds.intervals) == 3
    assert not any(note.startswith("not affine") for note in bounds.diagnostics)
