"""Scores in base 2 cost as few multiplications as they can, and the masks in them come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings

from flashgen import Float, Tensor
from flashgen.functions import tanh, where
from flashgen.scores import as_score, softcap
from flashgen.symbolic.hoisting import hoist
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.score import fold_score, split_infinite
from flashgen.symbolic.varies_over import SCALE, SCORES, Axes, varies_over
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, H, Load
from support import printed
from support.expressions import LOG2E, VALUES, expected_of, integers, reals

CAP = Float("cap", above=0.0)
SLOPES = Tensor("slopes", ("num_q_heads",))
MINUS_INF = -float("inf")


def traced(score_mod: Any) -> Any:
    return as_score(score_mod).traced.sym


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


@pytest.mark.parametrize(
    ("score_mod", "scalars", "result"),
    [
        (
            softcap(30.0),
            ["scale / 30"],
            "30.0 * 1.4426950408889634 * _tanh(scalar_0 * scores, APPROX)",
        ),
        (
            softcap(CAP),
            ["1.4426950408889634 * cap", "scale / cap"],
            "scalar_0 * _tanh(scalar_1 * scores, APPROX)",
        ),
        (
            alibi,
            [
                "_at_1d(slopes, h)",
                "1.4426950408889634 * scalar_slopes",
                "1.4426950408889634 * scale",
            ],
            "scalar_1 * scores + scalar_0 * (col_kv_idx - row_q_idx)",
        ),
        (
            as_score(alibi).then(softcap(20.0)),
            ["_at_1d(slopes, h)", "0.05 * scalar_slopes", "0.05 * scale"],
            "20.0 * 1.4426950408889634 * "
            "_tanh(scalar_1 * scores + scalar_0 * (col_kv_idx - row_q_idx), APPROX)",
        ),
        (
            softcap(CAP).then(alibi),
            [
                "_at_1d(slopes, h)",
                "1.4426950408889634 * scalar_slopes",
                "1.4426950408889634 * cap",
                "scale / cap",
            ],
            "scalar_1 * _tanh(scalar_2 * scores, APPROX) + scalar_0 * (col_kv_idx - row_q_idx)",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: where(kv_idx < 4, score, score / 2),
            ["1.4426950408889634 * scale", "1.4426950408889634 * scale / 2"],
            "tl.where(kv_idx < 4, scalar_0 * scores, scalar_1 * scores)",
        ),
    ],
)
def test_scale_and_log2e_go_where_scalars_are(
    score_mod: Any, scalars: list[str], result: str
) -> None:
    folded = fold_score(traced(score_mod))
    hoisted = hoist([folded.expr])
    assert [scalar.code.text() for scalar in hoisted.scalars] == scalars
    assert [found.text() for found in hoisted.results] == [result]
    assert folded.factor is None


@pytest.mark.parametrize(
    ("score_mod", "factor", "is_positive"),
    [
        (lambda score, b, h, q, k: score, SCALE * LOG2E, True),
        (lambda score, b, h, q, k: 0.5 * score, 0.5 * SCALE * LOG2E, True),
        (lambda score, b, h, q, k: score / CAP, SCALE * LOG2E / CAP.sym, True),
        (lambda score, b, h, q, k: -score, -SCALE * LOG2E, False),
        (
            lambda score, b, h, q, k: score * SLOPES[h] + score,
            SCALE * LOG2E * (1 + Load(SLOPES.sym, H)),
            False,
        ),
    ],
)
def test_a_score_that_is_only_scaled_is_a_factor(
    score_mod: Any, factor: Any, is_positive: bool
) -> None:
    folded = fold_score(traced(score_mod), positive=["cap"])
    assert sympy.expand(folded.factor - factor) == 0
    assert folded.factor_is_positive == is_positive
    assert sympy.expand(folded.expr - factor * SCORES) == 0
    assert len(hoist([folded.factor]).results) == 1


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, k: score * (q + 1),
        lambda score, b, h, q, k: score + q,
        lambda score, b, h, q, k: q + 0.5 * k,
        lambda score, b, h, q, k: where(q > 3, score, 2 * score),
    ],
)
def test_others_have_no_factor(score_mod: Any) -> None:
    assert fold_score(traced(score_mod)).factor is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(reals(3))
def test_folding_keeps_the_value(score: Any) -> None:
    score = score.xreplace({SCORES: SCORE})
    want = expected_of(score.xreplace({SCORE: SCALE * SCORES}), VALUES) / np.log(2)
    (found,) = printed.run(hoist([fold_score(score).expr], {"b": "batch", "h": "head"}), VALUES)
    np.testing.assert_allclose(np.broadcast_to(found, want.shape), want, rtol=1e-9, atol=1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(reals(3), reals(1), integers(1))
def test_outer_inner_and_shift_make_up_the_score(score: Any, slope: Any, whole: Any) -> None:
    folded = fold_score((score + slope * whole).xreplace({SCORES: SCORE}), positive=["cap"])
    assert varies_over(folded.outer) == Axes.SCALAR
    assert varies_over(folded.shift) in (Axes.SCALAR, Axes.ROW)
    want, outer, inner, shift = (
        expected_of(expr, VALUES).astype(float)
        for expr in (folded.expr, folded.outer, folded.inner, folded.shift)
    )
    assert (outer > 0).all()
    np.testing.assert_allclose(outer * inner + shift, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("score_mod", "outer", "inner", "shift"),
    [
        (lambda s, b, h, q, k: s, "1.4426950408889634 * scale", "scores", "0"),
        (softcap(30.0), "30.0 * 1.4426950408889634", "tanh(scale * scores / 30)", "0"),
        (softcap(CAP), "1.4426950408889634 * cap", "tanh(scale * scores / cap)", "0"),
        (
            alibi,
            "1.4426950408889634 * scale",
            "scores + (kv_idx - q_first) * slopes[h] / scale",
            "1.4426950408889634 * (q_first - q_idx) * slopes[h]",
        ),
        (
            lambda s, b, h, q, k: s + 0.5 * q - 2 * k,
            "1.4426950408889634 * scale",
            "scores - 2 * kv_idx / scale",
            "0.5 * 1.4426950408889634 * q_idx",
        ),
        # What a tensor adds may be -inf, which hides, or too low for log2(e) times 1 / scale.
        (
            lambda s, b, h, q, k: s + SLOPES[q] - 2 * k,
            "1",
            "1.4426950408889634 * scale * scores + 1.4426950408889634 * "
            "max(slopes[q_idx], 0.125 * slopes[q_idx] - 1.5e38) "
            "- 2 * 1.4426950408889634 * kv_idx",
            "0",
        ),
        # A sign that is not known stays inside.
        (
            lambda s, b, h, q, k: 2 * s * SLOPES[h],
            "2 * 1.4426950408889634 * scale",
            "scores * slopes[h]",
            "0",
        ),
        (lambda s, b, h, q, k: -s, "1.4426950408889634 * scale", "-scores", "0"),
        (
            lambda s, b, h, q, k: where(k < 4, s, s / 2 + q),
            "1.4426950408889634 * scale",
            "where(kv_idx < 4, scores, scores / 2 + q_idx / scale)",
            "0",
        ),
    ],
)
def test_the_inner_loop_is_left_with_little(
    score_mod: Any, outer: str, inner: str, shift: str
) -> None:
    folded = fold_score(traced(score_mod), positive=["cap"])
    found = tuple(map(plain_source, (folded.outer, folded.inner, folded.shift)))
    assert found == (outer, inner, shift)


def test_alibi_at_position_100000_is_as_exact_as_float32() -> None:
    """Within four units in the last place of what ``slope * (kv_idx - q_idx)`` comes to."""
    values = {
        **VALUES,
        "q_idx": np.arange(100_000, 100_005)[:, None],
        "q_first": 99_968,
        "kv_idx": np.array([[0, 5, 77, 50_003, 99_990, 99_999, 100_001]]),
        "scores": np.zeros((5, 7)),
        "slopes": np.float32([0.1, 0.2, 0.3, 0.4]).astype(float),
    }
    folded = fold_score(traced(alibi))
    hoisted = hoist([folded.outer, folded.inner, folded.shift], {"b": "batch", "h": "head"})
    outer, inner, shift = printed.run(hoisted, values, np.float32)
    want = expected_of(folded.expr, values).astype(float)
    largest = np.maximum(np.abs(want), np.abs(values["slopes"][2] * 64))
    assert np.max(np.abs(outer.astype(float) * inner + shift - want) / largest) <= 4 * 2.0**-23


SEEN, ALSO = sympy.Ge(Q_IDX, KV_IDX), sympy.Lt(KV_IDX, 8)


@pytest.mark.parametrize(
    ("score_mod", "score", "condition"),
    [
        (lambda s, b, h, q, k: 2 * s, 2 * SCORE, sympy.true),
        (lambda s, b, h, q, k: where(q >= k, s, MINUS_INF), SCORE, SEEN),
        (lambda s, b, h, q, k: where(~(q >= k), MINUS_INF, s), SCORE, SEEN),
        (lambda s, b, h, q, k: 3 * where(q >= k, s, MINUS_INF) + q, 3 * SCORE + Q_IDX, SEEN),
        (
            lambda s, b, h, q, k: where(q >= k, where(k < 8, s, MINUS_INF), MINUS_INF),
            SCORE,
            SEEN & ALSO,
        ),
        (
            lambda s, b, h, q, k: where(q >= k, s, MINUS_INF) + where(k < 8, 0, MINUS_INF),
            SCORE,
            SEEN & ALSO,
        ),
        (lambda s, b, h, q, k: s + MINUS_INF, 0, sympy.false),
        (lambda s, b, h, q, k: where(q >= k, s, torch.finfo(torch.float32).min), SCORE, SEEN),
        (lambda s, b, h, q, k: s + where(q >= k, 0.0, -1e30), SCORE, SEEN),
        (lambda s, b, h, q, k: s - 1e30 * (q - k), SCORE - 1e30 * (Q_IDX - KV_IDX), sympy.true),
    ],
)
def test_what_is_minus_infinity_is_masked(score_mod: Any, score: Any, condition: Any) -> None:
    found, seen = split_infinite(traced(score_mod))
    assert found == score
    for q in range(12):
        for k in range(12):
            at = {Q_IDX: q, KV_IDX: k}
            assert seen.subs(at) == condition.subs(at)


def test_a_choice_of_three_keeps_those_that_are_finite() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return where(q_idx < 3, score, where(q_idx < 6, MINUS_INF, 2 * score))

    score, seen = split_infinite(traced(score_mod))
    for q in range(9):
        assert seen.subs({Q_IDX: q, KV_IDX: 0}) == sympy.sympify(not 3 <= q < 6)
        if not 3 <= q < 6:
            assert score.subs(Q_IDX, q) == (SCORE if q < 3 else 2 * SCORE)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: where(s > 0, s, MINUS_INF),
        lambda s, b, h, q, k: where((q >= k) & (s + q > 0), s, MINUS_INF) * 2,
        lambda s, b, h, q, k: where(q >= k, where(tanh(s) > 0.5, MINUS_INF, s), s),
    ],
)
def test_what_is_hidden_by_its_own_score_is_refused(score_mod: Any) -> None:
    with pytest.raises(
        ValueError, match=r"by its own value, as `.*score.*`.*; give it a low number"
    ):
        split_infinite(traced(score_mod))


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: where(q >= k, s, float("inf")),
        lambda s, b, h, q, k: -where(q >= k, s, MINUS_INF),
        lambda s, b, h, q, k: tanh(where(q >= k, s, MINUS_INF)),
        lambda s, b, h, q, k: s * where(q >= k, s, MINUS_INF),
    ],
)
def test_other_infinities_are_refused(score_mod: Any) -> None:
    with pytest.raises(ValueError, match=r"inf.*hide a key with where\(condition, score, -inf\)"):
        split_infinite(traced(score_mod))
