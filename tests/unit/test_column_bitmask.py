"""Column bitmasks say what the condition says of each pair, whatever overflows."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings

from flashgen import AttentionSpec, causal, sliding_window
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.mask_code import (
    Condition,
    MaskCode,
    columns_end,
    least_comparisons,
    mask_code,
    rows_end,
)
from flashgen.symbolic.column_bitmask import column_bitmask
from flashgen.symbolic.nodes import AtLeast, Below
from flashgen.symbolic.printer import triton_code, triton_source
from flashgen.symbolic.varies_over import Axes, varies_over
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, B, FloorMod
from support.expressions import LEFT, conditions, integers
from support.variants import render_backward_hopper, shipped_plan

COLUMNS, ROWS = 128, 64
MOST = 2**31 - 1
I32 = np.int32


TL = SimpleNamespace(
    where=lambda c, a, b: np.where(c, a, b).astype(getattr(a, "dtype", I32)),
    minimum=np.minimum,
    maximum=np.maximum,
    abs=np.abs,
)


def source(condition: Any, along: Axes = Axes.ROW) -> str:
    bits = column_bitmask(condition, along, varies_over)
    return "" if bits is None else triton_source(bits)


def at_least(column: Any, least: Any) -> Any:
    """As the kernels have it, in int32 that must not overflow."""
    with np.errstate(over="raise"):
        least = np.minimum(np.maximum(least, column), column + I32(248))
        return I32(-1) << ((least - column + I32(7)) >> I32(3))


def by_bits(text: str, along: Axes, values: dict[str, Any]) -> Any:
    """Of each row and column, by the numbers of rows and the first eight columns."""
    first, rows = np.arange(8, dtype=I32)[None, :], np.arange(ROWS, dtype=I32)[:, None]
    columns_of, rows_of = ("q_idx", "kv_idx") if along == Axes.ROW else ("kv_idx", "q_idx")
    values = {name: I32(value) for name, value in values.items()}
    scope = {
        **values,
        columns_of: first + values[f"{columns_of}_first"],
        rows_of: rows + values[f"{rows_of}_first"],
        "_at_least": at_least,
        "_below": lambda column, end: ~at_least(column, end),
        "tl": TL,
    }
    bits = np.broadcast_to(eval(text, {}, scope), (ROWS, 8))
    bitmasks = np.arange(COLUMNS // 8)[None, :, None]
    return ((bits[:, None, :] >> bitmasks) & 1).reshape(ROWS, COLUMNS).astype(bool)


def by_pairs(condition: Any, along: Axes, values: dict[str, Any]) -> Any:
    """The same by the condition's own text, in 64 bits."""
    columns, rows = np.arange(COLUMNS)[None, :], np.arange(ROWS)[:, None]
    q, kv = (columns, rows) if along == Axes.ROW else (rows, columns)
    scope = {
        **{name: np.int64(value) for name, value in values.items()},
        "tl": TL,
        "q_idx": (q + values["q_idx_first"]),
        "kv_idx": (kv + values["kv_idx_first"]),
    }
    found = eval(triton_source(condition), {}, scope)
    return np.broadcast_to(found, (ROWS, COLUMNS)).astype(bool)


VALUES = {
    "q_idx_first": 256, "kv_idx_first": 192, "q_len": 300, "kv_len": 290, "left": 40, "b": 1, "h": 2
}  # fmt: skip
WINDOW = sympy.Ge(KV_IDX, Q_IDX - LEFT, evaluate=False)
COMPARED = {
    "q_idx >= kv_idx": "_at_least(q_idx, kv_idx)",
    "q_idx > kv_idx": "_at_least(q_idx - 1, kv_idx)",
    "q_idx <= kv_idx": "_below(q_idx - 1, kv_idx)",
    "q_idx < kv_idx": "_below(q_idx, kv_idx)",
    "kv_idx >= q_idx": "_below(q_idx - 1, kv_idx)",
    "kv_idx > q_idx": "_below(q_idx, kv_idx)",
    "kv_idx <= q_idx": "_at_least(q_idx, kv_idx)",
    "kv_idx < q_idx": "_at_least(q_idx - 1, kv_idx)",
}


@pytest.mark.parametrize("text", COMPARED)
def test_a_comparison_either_way(text: str) -> None:
    a, relation, b = text.split()
    kinds = {">=": sympy.Ge, ">": sympy.Gt, "<=": sympy.Le, "<": sympy.Lt}
    symbols = {"q_idx": Q_IDX, "kv_idx": KV_IDX}
    condition = kinds[relation](symbols[a], symbols[b], evaluate=False)
    assert source(condition) == COMPARED[text]
    for along in (Axes.ROW, Axes.COLUMN):
        found = by_bits(source(condition, along), along, VALUES)
        np.testing.assert_array_equal(found, by_pairs(condition, along, VALUES))


@pytest.mark.parametrize("left", [0, 40, 127, 128, 200, MOST])
@pytest.mark.parametrize("first", [0, 192, 2**30])
@pytest.mark.parametrize("along", [Axes.ROW, Axes.COLUMN])
def test_nothing_overflows_that_does_not_in_the_comparison(
    left: int, first: int, along: Axes
) -> None:
    values = VALUES | {"left": left, "q_idx_first": first, "kv_idx_first": first}
    found = by_bits(source(WINDOW, along), along, values)
    np.testing.assert_array_equal(found, by_pairs(WINDOW, along, values))


@pytest.mark.parametrize("bound", [-MOST - 1, -MOST, -1, 0, 300, MOST - 1, MOST])
@pytest.mark.parametrize("relation", [sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt])
def test_bounds_may_be_anything(bound: int, relation: Any) -> None:
    condition = relation(Q_IDX, LEFT, evaluate=False)
    values = VALUES | {"left": bound}
    np.testing.assert_array_equal(
        by_bits(source(condition), Axes.ROW, values), by_pairs(condition, Axes.ROW, values)
    )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (
            (Q_IDX >= KV_IDX) & (KV_IDX < KV_LEN),
            "tl.where(kv_idx < kv_len, -1, 0) & _at_least(q_idx, kv_idx)",
        ),
        (
            (KV_IDX < LEFT) | ~((Q_IDX >= KV_IDX) & (Q_IDX < Q_LEN)),
            "tl.where(kv_idx < left, -1, 0) | (~(_below(q_idx, q_len) & _at_least(q_idx, kv_idx)))",
        ),
        (sympy.Eq(B, 1), "tl.where(b == 1, -1, 0)"),
        (sympy.Eq(Q_IDX, KV_IDX), ""),
        (Q_IDX * 2 >= KV_IDX, ""),
        (KV_IDX - Q_IDX >= LEFT, ""),
        (
            sympy.Ge(LEFT, sympy.Abs(Q_IDX - KV_IDX)),
            "_below(q_idx - kv_idx - 1, left) & _at_least(q_idx - kv_idx, -left)",
        ),
        (sympy.Ge(Q_IDX + KV_IDX, LEFT, evaluate=False), ""),
        (sympy.Ge(FloorMod(Q_IDX, 4), KV_IDX, evaluate=False), ""),
        (sympy.Ge(Q_IDX, sympy.Rational(1, 2) * KV_IDX, evaluate=False), ""),
        ((Q_IDX >= KV_IDX) | sympy.Eq(Q_IDX, LEFT), ""),
    ],
    ids=str,
)
def test_what_has_bits(condition: Any, expected: str) -> None:
    assert source(condition) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(conditions(integers(1)))
def test_bits_mean_what_the_condition_means(condition: Any) -> None:
    if condition in (sympy.true, sympy.false):
        return
    for along in (Axes.ROW, Axes.COLUMN):
        text = source(condition, along)
        if text and "_at_" not in text.replace("_at_least", ""):
            np.testing.assert_array_equal(
                by_bits(text, along, VALUES), by_pairs(condition, along, VALUES)
            )


ROW_IDS, COL_IDS, COL_END = sympy.symbols("row_ids col_ids col_end", integer=True)
CAUSAL = (triton_code(Q_IDX >= KV_IDX), triton_code(AtLeast(Q_IDX, KV_IDX)))
TABLE = (triton_code(sympy.Eq(ROW_IDS, COL_IDS)), None)
HEADS = (triton_code(Q_IDX < COL_END), triton_code(Below(Q_IDX, COL_END)))


@pytest.mark.parametrize(
    ("given", "least", "expected"),
    [
        ([CAUSAL], 1, MaskCode((), (CAUSAL[1],), ("kv_idx",))),
        ([CAUSAL], 2, MaskCode((CAUSAL[0],))),
        ([CAUSAL, HEADS], 2, MaskCode((), (CAUSAL[1], HEADS[1]), ("kv_idx", "col_end"))),
        ([CAUSAL, TABLE], 1, MaskCode((CAUSAL[0], TABLE[0]))),
        ([rows_end("kv")], 1, MaskCode((triton_code(KV_IDX < KV_LEN),))),
        ([columns_end("q")], 1, MaskCode((), (triton_code(Below(Q_IDX, Q_LEN)),))),
        ([], 1, MaskCode(())),
    ],
)
def test_which_way_pays(given: list[Condition], least: int, expected: MaskCode) -> None:
    assert mask_code(given, "q_idx", ("kv_idx", "col_end"), least=least) == expected


@pytest.mark.parametrize(
    ("columns", "scored", "least"), [(64, True, 2), (64, False, 1), (128, True, 1)]
)
def test_from_how_many_comparisons_on(columns: int, scored: bool, least: int) -> None:
    assert least_comparisons(columns, scored=scored) == least


@pytest.mark.parametrize(
    ("name", "comparisons"),
    [
        ("causal_d64", 0),
        ("causal_d80", 0),
        ("full_d128", 0),
        ("window_d128", 2),
        ("prefix_d128", 3),
    ],
)
def test_the_forward_kernel_takes_bits_for_masks_of_two_comparisons(
    name: str, comparisons: int
) -> None:
    """Whether a key is one, which all masks with another kv_len ask, is not among them."""
    plan = shipped_plan(name)
    bits = " ".join(bitmasks.text() for bitmasks in HopperNames(plan).mask_code.bitmasks)
    assert len(re.findall(r"_below|_at_least", bits)) == comparisons


def test_positions_that_nothing_reads_are_not_computed() -> None:
    """A score linear in the distance takes columns of its own; the mask's are its bitmasks'."""
    spec = AttentionSpec(
        head_dim=128,
        mask=causal() & sliding_window(64, 0),
        score=lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - q_idx),
        deterministic=True,
    )
    plan = lower(spec, "linear")
    over_queries = render_backward_hopper(backward_plan(plan))
    for kernel, columns in (
        (render_hopper(plan), "_score_columns"),
        (over_queries, "_key_columns"),
    ):
        assert f" = {columns}(scores, start_n - q_first, gl.float32)" in kernel
        assert f"kv_idx = {columns}(" not in kernel
