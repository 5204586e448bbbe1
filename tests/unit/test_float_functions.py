"""What kernels have no function of: rounding of floats, arctangents, numbers in place of NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
import torch

from flashgen import AttentionSpec, Tensor, atan, erf, floor, gelu
from flashgen.symbolic.arctangent import with_polynomials
from flashgen.symbolic.gradient import derivative
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
    [({}, (2e38, -2e38, 0, 1.5)), ({"nan": 7.0, "posinf": 3.0, "neginf": -9.0}, (3, -9, 7, 1.5))],
)
def test_numbers_in_place_of_what_is_none(
    named: dict[str, float], expected: tuple[float, ...]
) -> None:
    sym = torch.nan_to_num(BIAS[Expr(KV_IDX)], **named).sym
    for x, wanted in zip((math.inf, -math.inf, math.nan, 1.5), expected, strict=True):
        assert evaluate(sym, {"bias": {(0,): x}, "kv_idx": 0}) == wanted
    assert torch.nan_to_num(Q).sym == Q_IDX


def test_a_score_in_place_of_which_a_number_stands_is_refused() -> None:
    """By its own value no key is hidden, and -2e38 hides one."""
    from flashgen.loader import Variant
    from flashgen.validate import validate

    spec = AttentionSpec(16, score=lambda s, *positions: torch.nan_to_num(s))
    (violation,) = validate(Variant("mine", spec, "specs/mine.py"))
    assert "the score is -inf or not by its own value" in str(violation)
