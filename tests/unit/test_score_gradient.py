"""What sums of a learned tensor's gradient are told apart by, from its indices."""

from __future__ import annotations

import pytest
import sympy

from flashgen import AttentionSpec, Int, Tensor, alibi, causal, relative_bias, t5_bias
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.score_gradient import by_distance, is_one_to_one, sum_over
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, B, FloorDiv, H, Load, evaluate

STEP = sympy.Symbol("step", integer=True)
ID_OF_KEY = Load(sympy.Symbol("ids"), B, KV_IDX)


@pytest.mark.parametrize(
    ("indices", "over"),
    [
        ((H,), "heads"),
        ((B, H), "heads"),
        ((H, Q_IDX), "rows"),
        ((FloorDiv(Q_IDX, 7),), "rows"),
        ((B, 3 * KV_IDX + KV_LEN), "columns"),
        ((B, ID_OF_KEY), "columns"),
        ((H, KV_IDX - Q_IDX), "diagonals"),
        ((H, STEP * (Q_IDX - KV_IDX + Q_LEN)), "diagonals"),
        ((STEP * Q_IDX - STEP * KV_IDX,), "diagonals"),
        ((FloorDiv(KV_IDX - Q_IDX + 5, 2), H), "diagonals"),
        ((sympy.Max(-STEP, sympy.Min(KV_IDX - Q_IDX, STEP)),), "diagonals"),
        ((sympy.Abs(KV_IDX - Q_IDX), B), "diagonals"),
        ((sympy.Piecewise((0, KV_IDX > Q_IDX), (1, True)),), "diagonals"),
        ((H, Q_IDX, KV_IDX), "elements"),
        ((KV_IDX - Q_IDX, KV_IDX), "elements"),
        ((Q_IDX + KV_IDX,), "elements"),
        ((2 * Q_IDX - KV_IDX,), "elements"),
        ((FloorDiv(KV_IDX, 2) - FloorDiv(Q_IDX, 2),), "elements"),
        ((sympy.Max(Q_IDX - KV_IDX, Q_IDX - 9),), "elements"),
        ((ID_OF_KEY - Q_IDX,), "elements"),
    ],
    ids=str,
)
def test_what_sums_are_told_apart_by(indices: tuple[sympy.Expr, ...], over: str) -> None:
    assert sum_over(indices) == over


@pytest.mark.parametrize(
    "expr",
    [
        KV_IDX - Q_IDX,
        5 - 3 * (KV_IDX - Q_IDX + Q_LEN - KV_LEN),
        sympy.Max(-4, sympy.Min(Q_IDX - KV_IDX, 6)),
        FloorDiv(sympy.Abs(KV_IDX - Q_IDX - 2), 3),
        sympy.Piecewise((Q_IDX - KV_IDX, KV_IDX < Q_IDX - 1), (7, True)),
        sympy.Piecewise((1, KV_IDX + Q_LEN >= Q_IDX + KV_LEN), (0, True)),
    ],
    ids=str,
)
def test_the_index_of_a_distance_is_that_of_every_pair_so_far_apart(expr: sympy.Expr) -> None:
    index = by_distance(expr)
    assert index.free_symbols <= {KV_IDX, Q_LEN, KV_LEN}
    lengths = {"q_len": 9, "kv_len": 12}
    for q_idx in range(9):
        for kv_idx in range(12):
            of_pair = evaluate(expr, lengths | {"q_idx": q_idx, "kv_idx": kv_idx})
            assert evaluate(index, lengths | {"kv_idx": kv_idx - q_idx}) == of_pair


@pytest.mark.parametrize(
    ("indices", "once"),
    [
        ((B, H, Q_IDX, KV_IDX), True),
        ((H, KV_IDX, B, Q_IDX), True),
        ((B, H, 2 * Q_IDX + STEP, 7 - KV_IDX, sympy.Integer(0)), True),
        ((H, Q_IDX, KV_IDX), False),
        ((B, H, KV_IDX - Q_IDX, KV_IDX), False),
        ((B, H, FloorDiv(Q_IDX, 2), KV_IDX), False),
        ((B, H, Q_IDX, ID_OF_KEY), False),
        ((B + H, Q_IDX, KV_IDX, sympy.Integer(0)), False),
    ],
    ids=str,
)
def test_whether_two_pairs_share_an_element(indices: tuple[sympy.Expr, ...], once: bool) -> None:
    assert is_one_to_one(indices) is once


_slopes = Tensor("slopes", ("num_q_heads",))


@pytest.mark.parametrize(
    ("score", "over"),
    [
        (alibi(_slopes), "heads"),
        (relative_bias(9), "diagonals"),
        (relative_bias(Int("far", 9), align="bottom_right"), "diagonals"),
        (t5_bias(), "diagonals"),
        (t5_bias(bidirectional=False, align="top_left"), "diagonals"),
    ],
    ids=str,
)
def test_the_vocabulary(score: object, over: str) -> None:
    backward = backward_plan(lower(AttentionSpec(64, mask=causal(), score=score), "learning"))  # type: ignore[arg-type]
    assert [item.over for item in backward.input_gradients] == [over]
