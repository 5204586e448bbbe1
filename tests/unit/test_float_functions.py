"""What kernels have no function of: rounding of floats, arctangents, numbers in place of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from flashgen import Tensor, atan, erf, floor, gelu, where
from flashgen.symbolic.arctangent import with_polynomials
from flashgen.symbolic.gradient import derivative
from flashgen.symbolic.score import split_infinite
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, Floor, FloorDiv, Truncate, evaluate
from flashgen.tracing.expr import Expr

S, Q = Expr(SCORE), Expr(Q_IDX)
BIAS = Tensor("bias", ("kv_len",))


def test_an_arctangent_holds_to_the_last_bits() -> None:
    polynomial = with_polynomials(sympy.atan(SCORE))
    for x in [*np.linspace(-3, 3, 601), 0.0, 1.0, -1.0, 1e-20, -1e30, 1e30]:
        assert evaluate(polynomial, {"score": float(x)}) == pytest.approx(math.atan(x), rel=3e-8)
    assert with_polynomials(sympy.tanh(SCORE)) == sympy.tanh(SCORE)
    # Of a number nothing is computed.
    assert with_polynomials(SCORE * sympy.atan(2)) == SCORE * sympy.atan(2)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (torch.floor(S), Floor(SCORE)),
        (torch.ceil(S), -Floor(-SCORE)),
        (floor(Q / 4), FloorDiv(Q_IDX, 4)),
        (S // 2, Floor(SCORE / 2)),
        (S % 7.0, SCORE - 7 * Floor(SCORE / 7)),
        (Q % 2.5, Q_IDX - 2.5 * FloorDiv(2 * Q_IDX, 5)),
        (Q // 0.5, 2 * Q_IDX),
        (Q // -1.5, FloorDiv(-2 * Q_IDX, 3)),
        (Q % -1.5, Q_IDX + 1.5 * FloorDiv(-2 * Q_IDX, 3)),
        (torch.floor(S).int(), Truncate(Floor(SCORE))),
        (erf(S), sympy.erf(SCORE)),
        (atan(S), sympy.atan(SCORE)),
    ],
)
def test_floats_are_rounded_as_floats_and_quotients_as_integers(
    expr: Expr, expected: sympy.Expr
) -> None:
    assert expr.sym == expected


def test_steps_have_no_slope() -> None:
    assert derivative((S % 7.25).sym, SCORE) == 1
    assert derivative((S // 7.25).sym, SCORE) == 0
    assert derivative(Floor(SCORE / 3) * SCORE, SCORE) == Floor(SCORE / 3)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_torchs(approximate: str) -> None:
    for x in (-8.0, -1.5, 0.0, 0.3, 4.0):
        theirs = torch.nn.functional.gelu(
            torch.tensor(x, dtype=torch.float64), approximate=approximate
        )
        found = evaluate(gelu(S, approximate).sym, {"score": x})
        assert found == pytest.approx(float(theirs), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("named", "expected"),
    [({}, (9e19, -9e19, 0, 1.5)), ({"nan": 7.0, "posinf": 3.0, "neginf": -9.0}, (3, -9, 7, 1.5))],
)
def test_numbers_in_place_of_what_is_none(
    named: dict[str, float], expected: tuple[float, ...]
) -> None:
    sym = torch.nan_to_num(BIAS[Expr(KV_IDX)], **named).sym
    for x, wanted in zip((math.inf, -math.inf, math.nan, 1.5), expected, strict=True):
        assert evaluate(sym, {"bias": {(0,): x}, "kv_idx": 0}) == wanted
    assert torch.nan_to_num(Q).sym == Q_IDX


def visible_by(score: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The score function without its infinities, and where it hides no key."""
    return split_infinite(score(S).sym)


@pytest.mark.parametrize("neginf", [None, -1e4, torch.finfo(torch.float32).min])
def test_a_number_in_place_of_an_infinite_score_hides_no_key(neginf: float | None) -> None:
    finite, condition = visible_by(lambda s: torch.nan_to_num(s * 1.5, neginf=neginf))
    assert condition is sympy.true
    least = evaluate(finite, {"score": -math.inf})
    assert least == (-1e4 if neginf == -1e4 else -9e19)
    assert evaluate(finite, {"score": 2.0}) == 3.0


def test_what_a_choice_hides_is_a_number_too() -> None:
    inner = where(Expr(KV_IDX) <= Q, S, where(Q == 3, math.inf, -math.inf))
    finite, condition = visible_by(lambda s: torch.nan_to_num(inner, posinf=5.0))
    assert condition is sympy.true
    for q, found in ((9, 1.25), (3, 5.0), (2, -9e19)):
        assert evaluate(finite, {"score": 1.25, "q_idx": q, "kv_idx": 7}) == found


def test_minus_infinity_in_place_of_an_infinite_score_is_refused() -> None:
    with pytest.raises(ValueError, match="by its own value"):
        visible_by(lambda s: torch.nan_to_num(s, neginf=-math.inf))


@pytest.mark.parametrize("x", [-math.inf, -2.5, 0.0, 0.05, 1.5, math.inf])
@pytest.mark.parametrize(
    "function",
    [
        torch.isfinite,
        torch.isinf,
        torch.nn.functional.tanhshrink,
        lambda x: torch.nn.functional.threshold(x, 0.1, -2.0),
        lambda x: torch.hypot(x, x + 1),
        lambda x: torch.addcmul(x, x, x + 1, value=0.5),
        lambda x: torch.addcdiv(x, x, x + 7),
    ],
    ids=["isfinite", "isinf", "tanhshrink", "threshold", "hypot", "addcmul", "addcdiv"],
)
def test_functions_of_single_values_are_torchs(function: Callable[..., Any], x: float) -> None:
    expected = function(torch.tensor(x, dtype=torch.float64))
    if expected.dtype != torch.bool and not torch.isfinite(expected):
        return  # arithmetic of infinities
    found = evaluate(function(BIAS[Expr(KV_IDX)]).sym, {"bias": {(0,): x}, "kv_idx": 0})
    assert found == pytest.approx(float(expected), rel=1e-12)
