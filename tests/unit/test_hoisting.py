"""What is placed means what was asked for, and lies where it is computed least often."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings

from flashgen.symbolic.hoisting import Hoisted, hoist
from flashgen.symbolic.printer import triton_source
from flashgen.symbolic.trace import trace
from flashgen.symbolic.varies_over import SCALE, SCORES
from flashgen.symbols import KV_IDX, Q_IDX, B, FloorMod, H, Load, Truncate, evaluate
from support import printed
from support.expressions import (
    BIAS,
    CAP,
    DOC,
    FLAG,
    LEFT,
    LOG2E,
    SLOPES,
    TEMPERATURE,
    VALUES,
    N,
    choice,
    conditions,
    expected_of,
    integers,
    reals,
)
from support.variety import MASK_SPECS

NAMES = {"b": "batch", "h": "head"}
DISTANCE = KV_IDX - Q_IDX


def shown(hoisted: Hoisted) -> str:
    """All of it as a person would write it down."""
    lines = [
        f"{group}: {assignment.name} = {assignment.code.text()}"
        for group in ("scalars", "rows", "columns", "elements")
        for assignment in getattr(hoisted, group)
    ]
    return "\n".join([*lines, *(result.text() for result in hoisted.results)])


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (
            SCORES * SCALE * LOG2E,
            "scalars: scalar_0 = 1.4426950408889634 * scale\nscalar_0 * scores",
        ),
        (
            SCORES + Load(SLOPES, H) * DISTANCE,
            """
            scalars: scalar_slopes = _at_1d(slopes, head)
            rows: row_q_idx = tl.cast(q_idx, tl.float32)
            columns: col_kv_idx = tl.cast(kv_idx, tl.float32)
            scores + scalar_slopes * (col_kv_idx - row_q_idx)
            """,
        ),
        # sympy distributes a number over a sum; the difference of integers is put together again.
        (
            SCORES + 0.1 * DISTANCE,
            """
            rows: row_q_idx = tl.cast(q_idx, tl.float32)
            columns: col_kv_idx = tl.cast(kv_idx, tl.float32)
            scores + 0.1 * (col_kv_idx - row_q_idx)
            """,
        ),
        (
            SCORES - CAP * sympy.Abs(Q_IDX + LEFT - KV_IDX),
            """
            rows: row_0 = tl.cast(q_idx + left, tl.float32)
            columns: col_kv_idx = tl.cast(kv_idx, tl.float32)
            scores - cap * tl.abs(col_kv_idx - row_0)
            """,
        ),
        # Times of the year 2026 in seconds: float32 knows them to within two minutes.
        (
            SCORES - CAP * sympy.Abs(Load(DOC, B, Q_IDX) - Load(DOC, B, KV_IDX)),
            """
            rows: row_doc = _at_2d(doc, batch, q_idx)
            columns: col_doc = _at_2d(doc, batch, kv_idx)
            scores - cap * tl.cast(tl.abs(col_doc - row_doc), tl.float32)
            """,
        ),
        (
            SCORES + Load(BIAS, H, Q_IDX - KV_IDX + N),
            "scores + _at_2d(bias, head, q_idx + n - kv_idx)",
        ),
        (
            SCORES + CAP * Load(BIAS, B, Q_IDX) + Load(BIAS, B, KV_IDX) * Load(SLOPES, H),
            """
            scalars: scalar_slopes = _at_1d(slopes, head)
            rows: row_bias = _at_2d(bias, batch, q_idx)
            rows: row_0 = cap * row_bias
            columns: col_bias = _at_2d(bias, batch, kv_idx)
            columns: col_0 = col_bias * scalar_slopes
            scores + col_0 + row_0
            """,
        ),
        (
            SCORES * sympy.log(Q_IDX + 1) * CAP / 3,
            """
            scalars: scalar_0 = cap / 3
            rows: row_0 = tl.cast(q_idx + 1, tl.float32)
            rows: row_1 = scalar_0 * tl.log(row_0)
            row_1 * scores
            """,
        ),
        # 32 bits do not hold the square of a position.
        (
            SCORES + CAP * KV_IDX**2,
            """
            columns: col_kv_idx = tl.cast(kv_idx, tl.float32)
            columns: col_0 = col_kv_idx * col_kv_idx
            columns: col_1 = cap * col_0
            scores + col_1
            """,
        ),
        (
            CAP * sympy.tanh(SCORES / CAP) + sympy.tanh(SCORES / CAP) ** 2 + sympy.tanh(CAP),
            """
            scalars: scalar_0 = 1 / cap
            scalars: scalar_1 = _tanh(cap, False)
            elements: elem_0 = _tanh(scalar_0 * scores, APPROX)
            cap * elem_0 + elem_0 * elem_0 + scalar_1
            """,
        ),
        (
            sympy.Eq(Load(DOC, B, Q_IDX), Load(DOC, B, KV_IDX)),
            """
            rows: row_doc = _at_2d(doc, batch, q_idx)
            columns: col_doc = _at_2d(doc, batch, kv_idx)
            row_doc == col_doc
            """,
        ),
        (
            sympy.Ne(Load(FLAG, Load(DOC, B, KV_IDX)), 0, evaluate=False),
            """
            columns: col_doc = _at_2d(doc, batch, kv_idx)
            columns: col_flag = _at_1d(flag, col_doc)
            col_flag != 0
            """,
        ),
        (
            (Q_IDX + LEFT >= KV_IDX) & sympy.Lt(KV_IDX, Load(DOC, B, 0)),
            """
            scalars: scalar_doc = _at_2d(doc, batch, 0)
            (kv_idx < scalar_doc) & (q_idx + left >= kv_idx)
            """,
        ),
    ],
    ids=str,
)
def test_each_part_is_computed_where_it_costs_least(expr: Any, expected: str) -> None:
    lines = [line.strip() for line in expected.strip().splitlines()]
    assert shown(hoist([expr], NAMES)).splitlines() == lines


def test_several_expressions_share_what_they_read() -> None:
    loaded = Load(DOC, B, Q_IDX)
    gathered = Load(BIAS, H, Q_IDX - KV_IDX + N)
    seen = (sympy.Eq(loaded, Load(DOC, B, KV_IDX)), gathered > 0)
    hoisted = hoist([*seen, SCORES + gathered + CAP * loaded], NAMES)
    used_by = {
        assignment.name: assignment.used_by
        for group in (hoisted.scalars, hoisted.rows, hoisted.columns, hoisted.elements)
        for assignment in group
    }
    assert used_by == {"row_doc": (0, 2), "row_0": (2,), "col_doc": (0,), "elem_0": (1, 2)} | {
        name: (2,) for name in used_by if name == "row_1"
    }
    assert hoisted.carried[:4] == ("q_idx", "batch", "head", "bias")


def test_a_rows_division_is_done_once() -> None:
    hoisted = hoist([trace(MASK_SPECS["chunks"].mask).expr], NAMES)
    assert shown(hoisted).splitlines() == ["rows: row_0 = q_idx // 12", "row_0 == kv_idx // 12"]


@pytest.mark.parametrize("name", [name for name in MASK_SPECS if name != "chunks"])
def test_masks_that_load_nothing_stay_as_they_are_printed(name: str) -> None:
    seen = trace(MASK_SPECS[name].mask).expr
    hoisted = hoist([seen], NAMES)
    assert shown(hoisted) == triton_source(seen, NAMES)


def test_new_names_are_nobody_elses() -> None:
    taken = sympy.symbols("scalar_0 row_q_idx", real=True)
    expr = SCORES * CAP * taken[0] + DISTANCE * taken[1]
    hoisted = hoist([expr], {}, taken=["scalar_1", "col_kv_idx"])
    assert [a.name for a in hoisted.scalars] == ["scalar_2"]
    assert [a.name for a in (*hoisted.rows, *hoisted.columns)] == ["row_q_idx_1", "col_kv_idx_1"]


def test_the_same_expressions_give_the_same_text() -> None:
    expr = SCORES + Load(SLOPES, H) * DISTANCE + sympy.tanh(CAP * SCORES)
    assert hoist([expr], NAMES) == hoist([expr], NAMES)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(reals(3), conditions(integers(1)))
def test_what_is_placed_means_what_sympy_means(expr: Any, seen: Any) -> None:
    values = VALUES
    found = printed.run(hoist([seen, expr], NAMES), values)
    for value, original in zip(found, (seen, expr), strict=True):
        want = expected_of(original, values)
        np.testing.assert_allclose(np.broadcast_to(value, want.shape), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("expr", "bound"),
    [
        (SCALE * SCORES + Load(SLOPES, H) * DISTANCE, 3),
        (SCALE * SCORES + 0.1 * DISTANCE, 3),
        (SCALE * SCORES + DISTANCE, 2),
        (SCALE * SCORES - 0.3 * sympy.Abs(DISTANCE + LEFT), 3),
        (CAP * sympy.tanh(SCALE * SCORES / CAP), 5),
        (CAP * sympy.tanh((SCALE * SCORES + 0.01 * DISTANCE) / CAP), 8),
        (SCALE * SCORES / (1 + CAP * sympy.log(1 + Q_IDX)), 6),
        (SCALE * SCORES + Load(BIAS, H, DISTANCE + 10) * LOG2E, 3),
        (SCALE * SCORES * sympy.log(KV_IDX + 1) * LOG2E, 6),
    ],
    ids=str,
)
def test_positions_of_100000_lose_no_accuracy(expr: Any, bound: int) -> None:
    """Within ``bound`` units in the last place of the largest term, as float32 has it.

    ``slope * kv_idx - slope * q_idx`` would be off by thousands of them.
    """
    values = {**VALUES, "q_idx": printed.Q_IDX + 100_000, "kv_idx": printed.KV_IDX + 100_000}
    rounded = {
        name: value.astype(np.float32).astype(float)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f"
        else value
        for name, value in values.items()
    }
    (found,) = printed.run(hoist([expr], NAMES), values, np.float32)
    want = expected_of(expr, rounded)
    terms = [expected_of(term, rounded) for term in sympy.Add.make_args(expr)]
    largest = np.max(np.abs(terms), axis=0)
    assert found.dtype == np.float32
    assert np.max(np.abs(found - want) / np.maximum(largest, 1.0)) <= bound * 2.0**-23


def bucket(distance: Any) -> Any:
    """T5's buckets of relative positions: eight near ones, then eight on a logarithmic scale."""
    near = sympy.Max(distance, 0)
    scaled = sympy.log(sympy.Max(near, 1) / 8) * sympy.Float(8 / math.log(16))
    far = sympy.Min(8 + Truncate(scaled), 15)
    return sympy.Piecewise((near, near < 8), (far, True), evaluate=False)


@pytest.mark.parametrize(
    "expr",
    [
        CAP * sympy.tanh(SCALE * SCORES / CAP),
        SCALE * SCORES + Load(BIAS, H, bucket(KV_IDX - Q_IDX)),
        SCALE * SCORES + Load(BIAS, H, bucket(Q_IDX - KV_IDX)),
        SCALE * SCORES * Load(TEMPERATURE, FloorMod(H, 2)),
        choice(sympy.Eq(FloorMod(sympy.Abs(DISTANCE), 2), 1), SCORES * SCALE, SCORES * CAP),
        CAP * sympy.tanh((SCORES + Load(SLOPES, H) * DISTANCE) / CAP),
        sympy.Piecewise(
            (SCORES, KV_IDX < 4), (SCORES * CAP, Q_IDX > 8), (-5, KV_IDX > 8), (0, True)
        ),
    ],
    ids=str,
)
def test_the_usual_scores(expr: Any) -> None:
    (found,) = printed.run(hoist([LOG2E * expr], NAMES), VALUES, np.float32)
    want = expected_of(LOG2E * expr, VALUES)
    np.testing.assert_allclose(np.broadcast_to(found, want.shape), want, rtol=2e-6, atol=2e-6)


def test_buckets_of_the_logarithm_are_those_of_python() -> None:
    """Whole numbers under the logarithm that is cut off are no matter of rounding in float32."""
    values = {**VALUES, "q_idx": np.arange(600)[:, None], "kv_idx": np.array([[0]])}
    values["scores"] = np.zeros((600, 1))
    expr = sympy.Add(SCORES, bucket(Q_IDX - KV_IDX))
    hoisted = hoist([expr], NAMES)
    scope = printed.scope_of(values, np.float32)
    for group in (hoisted.rows, hoisted.columns, hoisted.elements):
        for assignment in group:
            scope[assignment.name] = eval(assignment.code.text(), {}, scope)
    found = eval(hoisted.results[0].text(), {}, scope)
    want = [evaluate(bucket(sympy.Integer(q)), {}) for q in range(600)]
    assert found.ravel().tolist() == want
