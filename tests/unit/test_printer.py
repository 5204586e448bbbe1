"""The printers: readable, strict, and meaning what sympy means in each language's arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings

from flashgen.symbolic import torch_source, triton_source
from flashgen.symbolic.printer import plain_source, triton_code
from flashgen.symbolic.printer.dialects import Gluon
from flashgen.symbolic.varies_over import SCORES
from flashgen.symbols import (
    KV_IDX,
    KV_LEN,
    Q_FIRST,
    Q_IDX,
    Q_LAST,
    Q_LEN,
    SCORE,
    B,
    BitAnd,
    FloorDiv,
    FloorMod,
    H,
    Load,
    RowMax,
    RowMin,
    Truncate,
    evaluate,
)
from support.expressions import VALUES as random_values
from support.expressions import conditions as random_conditions
from support.expressions import expected_of, reals

CAP, BIAS = sympy.symbols("cap bias", real=True)
LEFT, WIDTH, DOC = sympy.symbols("left width doc", integer=True)
TILE = {"q_idx": "offs_m[:, None]", "kv_idx": "offs_n[None, :]"}


def max_of(*parts: Any) -> Any:
    return sympy.Max(*parts, evaluate=False)


def min_of(*parts: Any) -> Any:
    return sympy.Min(*parts, evaluate=False)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (sympy.Integer(0), "0"),
        (sympy.Integer(-3), "-3"),
        (sympy.true, "True"),
        (Q_LAST + 1, "q_last + 1"),
        (-LEFT + Q_FIRST, "q_first - left"),
        (KV_LEN + Q_LAST - Q_LEN + 1, "q_last + kv_len - q_len + 1"),
        (1 - LEFT, "1 - left"),
        (-LEFT - 1, "-left - 1"),
        (-2 * LEFT + Q_IDX - 3, "q_idx - 2 * left - 3"),
        (-LEFT, "-left"),
        (-2 * LEFT * WIDTH, "-(2 * left * width)"),
        (LEFT * (WIDTH + 1), "left * (width + 1)"),
        (LEFT**2, "left * left"),
        (min_of(KV_LEN, Q_LAST + 1), "min(kv_len, q_last + 1)"),
        (max_of(0, Q_FIRST - LEFT), "max(0, q_first - left)"),
        (
            max_of(0, min_of(KV_LEN, Q_LAST + LEFT), Q_FIRST),
            "max(0, max(q_first, min(kv_len, q_last + left)))",
        ),
        (FloorDiv(Q_IDX, 4), "q_idx // 4"),
        (FloorDiv(Q_IDX + 1, WIDTH) * 2 + 1, "2 * ((q_idx + 1) // width) + 1"),
        (FloorMod(KV_IDX, 3), "kv_idx % 3"),
        (FloorMod(FloorDiv(KV_IDX, 4), 3), "(kv_idx // 4) % 3"),
        (sympy.Ge(Q_IDX, KV_IDX), "q_idx >= kv_idx"),
        (sympy.Eq(Q_IDX, KV_IDX), "q_idx == kv_idx"),
        (sympy.Ne(Q_IDX, KV_IDX), "q_idx != kv_idx"),
        (
            (KV_IDX >= Q_IDX - LEFT) & (Q_IDX >= KV_IDX),
            "(q_idx >= kv_idx) & (kv_idx >= q_idx - left)",
        ),
        (
            (Q_IDX >= KV_IDX) & ((KV_IDX < 4) | (KV_IDX < LEFT)),
            "(q_idx >= kv_idx) & ((kv_idx < 4) | (kv_idx < left))",
        ),
    ],
    ids=str,
)
def test_both_printers_write_what_a_person_would(expr: Any, expected: str) -> None:
    assert triton_source(expr) == expected
    assert torch_source(expr) == expected


@pytest.mark.parametrize(
    ("expr", "triton", "torch_text"),
    [
        (
            30.0 * sympy.tanh(SCORE / 30.0),
            "30.0 * _tanh(0.03333333333333333 * score, APPROX)",
            "30.0 * torch.tanh(0.03333333333333333 * score)",
        ),
        (
            CAP * sympy.tanh(SCORE / CAP),
            "cap * _tanh(score / cap, APPROX)",
            "cap * torch.tanh(score / cap)",
        ),
        (SCORE / 2 + CAP / 3, "0.5 * score + cap / 3", "0.5 * score + cap / 3"),
        (SCORE * CAP / WIDTH, "cap * score / tl.cast(width, tl.float32)", "cap * score / width"),
        (
            SCORE + KV_IDX - Q_IDX,
            "score + tl.cast(kv_idx - q_idx, tl.float32)",
            "score + (kv_idx - q_idx).to(dtype)",
        ),
        (Load(BIAS, H, Q_IDX) + 1, "_at_2d(bias, h, q_idx) + 1", "bias[h, q_idx].to(dtype) + 1"),
        (Load(DOC, KV_IDX) + 1, "_at_1d(doc, kv_idx) + 1", "doc[kv_idx] + 1"),
        (
            sympy.Ne(Load(DOC, KV_IDX), 0, evaluate=False),
            "_at_1d(doc, kv_idx) != 0",
            "doc[kv_idx] != 0",
        ),
        (1 / (1 + sympy.exp(-SCORE)), "1 / (tl.exp(-score) + 1)", "1 / (torch.exp(-score) + 1)"),
        (sympy.exp(CAP), "tl.exp(cap)", "math.exp(cap)"),
        (SCORE**2, "score * score", "score * score"),
        (SCORE**-2, "1 / (score * score)", "1 / (score * score)"),
        (SCORE**0.5, "tl.sqrt(score)", "torch.sqrt(score)"),
        (CAP / sympy.sqrt(SCORE), "cap * tl.rsqrt(score)", "cap * torch.rsqrt(score)"),
        (SCORE ** sympy.Rational(3, 2), "tl.sqrt(score) * score", "torch.sqrt(score) * score"),
        (2**CAP, "tl.math.exp2(cap)", "math.exp2(cap)"),
        (sympy.Float(8.0) ** SCORE, "tl.math.exp2(3.0 * score)", "torch.exp2(3.0 * score)"),
        (SCORE / sympy.log(2), "1.4426950408889634 * score", "1.4426950408889634 * score"),
        (sympy.log(KV_IDX), "tl.log(tl.cast(kv_idx, tl.float32))", "torch.log(kv_idx.to(dtype))"),
        (
            Truncate(CAP * KV_IDX),
            "tl.cast(cap * tl.cast(kv_idx, tl.float32), tl.int32)",
            "(cap * kv_idx.to(dtype)).long()",
        ),
        (max_of(SCORE, 0), "tl.maximum(0.0, score)", "torch.clamp(score, min=0)"),
        (
            min_of(SCORE, KV_IDX),
            "tl.minimum(tl.cast(kv_idx, tl.float32), score)",
            "torch.minimum(kv_idx.to(dtype), score)",
        ),
        (min_of(CAP, WIDTH), "tl.minimum(cap, tl.cast(width, tl.float32))", "min(cap, width)"),
        (BitAnd(KV_IDX, 3), "kv_idx & 3", "kv_idx & 3"),
        (
            BitAnd(Q_IDX, 7) - BitAnd(KV_IDX, 7) + BitAnd(KV_IDX, 1),
            "(q_idx & 7) + (kv_idx & 1) - (kv_idx & 7)",
            "(q_idx & 7) + (kv_idx & 1) - (kv_idx & 7)",
        ),
        (
            sympy.Abs(Q_IDX - KV_IDX) ** sympy.Float(0.3),
            "tl.math.exp2(0.3 * tl.log2(tl.cast(tl.abs(kv_idx - q_idx), tl.float32)))",
            "abs(kv_idx - q_idx).to(dtype) ** 0.3",
        ),
        (
            sympy.Not((KV_IDX > 3) & (Q_IDX > 3)),
            "~((kv_idx > 3) & (q_idx > 3))",
            "~((kv_idx > 3) & (q_idx > 3))",
        ),
        (
            sympy.Not((LEFT > 3) & (WIDTH > 3)),
            "~((left > 3) & (width > 3))",
            "(not ((left > 3) & (width > 3)))",
        ),
        (
            sympy.Piecewise((SCORE, KV_IDX > 3), (1, Q_IDX > 3), (0.5, True)),
            "tl.where(kv_idx > 3, score, tl.where(q_idx > 3, 1.0, 0.5))",
            "torch.where(kv_idx > 3, score, torch.where(q_idx > 3, "
            "torch.tensor(1, dtype=dtype), torch.tensor(0.5, dtype=dtype)))",
        ),
        (sympy.Abs(Q_IDX - KV_IDX), "tl.abs(kv_idx - q_idx)", "abs(kv_idx - q_idx)"),
        (
            sympy.Piecewise((LEFT, Q_FIRST >= 5), (0, True)),
            "tl.where(q_first >= 5, left, 0)",
            "(left if q_first >= 5 else 0)",
        ),
        (FloorMod(LEFT, 4), "(left % 4 + 4) % 4", "left % 4"),
        (
            FloorDiv(Q_IDX - LEFT, 4),
            "((q_idx - left) - ((q_idx - left) % 4 + 4) % 4) // 4",
            "(q_idx - left) // 4",
        ),
    ],
    ids=str,
)
def test_the_languages_differ_where_they_must(expr: Any, triton: str, torch_text: str) -> None:
    assert triton_source(expr) == triton
    assert torch_source(expr) == torch_text


def test_a_person_reads_mathematics() -> None:
    score = 30.0 * sympy.tanh(SCORE / 30.0) + Load(BIAS, H) * (KV_IDX - Q_IDX)
    assert plain_source(score) == "30.0 * tanh(score / 30) + (kv_idx - q_idx) * bias[h]"
    assert (
        plain_source(max_of(0, RowMin(Load(DOC, Q_IDX))))
        == "max(0, min(doc[q_rows] over the rows))"
    )


def test_gluon_kernels_take_powers_of_2() -> None:
    """One instruction each; those of e need predicates."""
    code = triton_code(sympy.exp(CAP - 1))
    assert code.text(Gluon({})) == "gl.exp2((cap - 1) * 1.4426950408889634)"


def test_the_extremes_over_a_tile_reduce_a_vector_of_its_rows() -> None:
    names = {"q_idx": "offs_m[:, None]", "q_rows": "rows"}
    least = max_of(0, RowMin(Load(DOC, B, Q_IDX) + 1))
    assert triton_source(least, names) == "max(0, tl.min(_at_2d(doc, b, rows) + 1, 0))"
    assert triton_source(RowMax(Load(DOC, Q_IDX))) == "tl.max(_at_1d(doc, q_rows), 0)"
    with pytest.raises(TypeError, match="no tile in torch"):
        torch_source(least)


def test_what_is_computed_once_needs_no_approximation() -> None:
    assert triton_source(sympy.tanh(CAP), approximate=False) == "_tanh(cap, False)"


def test_a_parameter_known_to_be_nonnegative_needs_no_correction() -> None:
    assert triton_source(FloorMod(LEFT + Q_IDX, 4), nonnegative=["left"]) == "(q_idx + left) % 4"


def test_symbols_take_the_names_of_the_place_they_are_printed_in() -> None:
    expr = (Q_IDX >= KV_IDX) & (KV_IDX >= Q_IDX - LEFT)
    assert triton_source(expr, TILE) == (
        "(offs_m[:, None] >= offs_n[None, :]) & (offs_n[None, :] >= offs_m[:, None] - left)"
    )


@pytest.mark.parametrize(
    "expr",
    [
        sympy.tan(Q_IDX),
        sympy.Pow(-2, LEFT),
        sympy.oo,
        sympy.floor(Q_IDX / 2),
        sympy.Xor(Q_IDX > 1, KV_IDX > 1, evaluate=False),
        sympy.Piecewise((1, Q_IDX > 1), (2, Q_IDX > 0)),
        Load(DOC, sympy.Symbol("x", real=True)),
    ],
    ids=str,
)
def test_an_unknown_node_is_an_error(expr: Any) -> None:
    for source in (triton_source, torch_source):
        with pytest.raises(TypeError, match=r"the printer (knows|does not know)"):
            source(expr)


class CInt(int):
    """An integer whose ``//`` and ``%`` round towards zero, as Triton's do."""

    def _of(self, value: int) -> CInt:
        return CInt(value)

    def __add__(self, other: int) -> CInt:
        return CInt(int(self) + int(other))

    def __sub__(self, other: int) -> CInt:
        return CInt(int(self) - int(other))

    def __mul__(self, other: int) -> CInt:
        return CInt(int(self) * int(other))

    def __neg__(self) -> CInt:
        return CInt(-int(self))

    def __floordiv__(self, other: int) -> CInt:
        quotient = abs(int(self)) // abs(int(other))
        return CInt(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other: int) -> CInt:
        return CInt(int(self) - int(other) * int(self // other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> CInt:
        return CInt(int(other) - int(self))


def test_c_integers_round_towards_zero() -> None:
    assert (CInt(-7) // 2, CInt(-7) % 2, CInt(7) // 2) == (-3, -1, 3)


def expressions(depth: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.sampled_from([Q_IDX, KV_IDX, KV_LEN, LEFT, WIDTH]),
        st.integers(-5, 5).map(sympy.Integer),
    )
    if depth == 0:
        return leaves
    inner = expressions(depth - 1)
    divisor = st.one_of(st.integers(1, 5).map(sympy.Integer), st.just(WIDTH))
    return st.one_of(
        leaves,
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(FloorDiv, inner, divisor),
        st.builds(FloorMod, inner, divisor),
        st.builds(sympy.Abs, inner),
        st.builds(lambda a, b: min_of(a, b) if a != b else a, inner, inner),
        st.builds(lambda a, b: max_of(a, b) if a != b else a, inner, inner),
    )


def conditions(depth: int) -> st.SearchStrategy[Any]:
    relations = st.sampled_from([sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne])
    compare = st.builds(
        lambda relation, a, b: relation(a, b, evaluate=False),
        relations,
        expressions(2),
        expressions(2),
    )
    if depth == 0:
        return compare
    inner = conditions(depth - 1)
    return st.one_of(compare, st.builds(sympy.And, inner, inner), st.builds(sympy.Or, inner, inner))


VALUES = st.fixed_dictionaries(
    {
        "q_idx": st.integers(0, 20),
        "kv_idx": st.integers(0, 20),
        "kv_len": st.integers(1, 20),
        "left": st.integers(-9, 9),
        "width": st.integers(1, 7),
    }
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(expressions(3), conditions(2)), VALUES)
def test_what_is_printed_means_what_sympy_means(expr: Any, values: dict[str, int]) -> None:
    expected = evaluate(expr, values)
    c_values = {name: CInt(value) for name, value in values.items()}
    tl = SimpleNamespace(
        abs=lambda x: CInt(abs(int(x))),
        minimum=lambda a, b: CInt(min(a, b)),
        maximum=lambda a, b: CInt(max(a, b)),
    )
    assert eval(triton_source(expr), {"tl": tl}, c_values) == expected
    positions = {name: torch.tensor(values[name]) for name in ("q_idx", "kv_idx")}
    assert eval(torch_source(expr), {"torch": torch}, values | positions) == expected


@settings(max_examples=50, deadline=None, derandomize=True)
@given(conditions(1), VALUES)
def test_a_printed_predicate_runs_on_torch_tensors(expr: Any, values: dict[str, int]) -> None:
    q_idx, kv_idx = torch.arange(6)[:, None], torch.arange(7)[None, :]
    scope = {**values, "q_idx": q_idx, "kv_idx": kv_idx, "torch": torch}
    seen = torch.zeros(6, 7, dtype=torch.bool) | eval(torch_source(expr), {}, scope)
    for i in range(6):
        for j in range(7):
            assert bool(seen[i, j]) == evaluate(expr, {**values, "q_idx": i, "kv_idx": j})


SCORE_TILE = np.linspace(-4.0, 4.0, 35).reshape(5, 7)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(reals(3), random_conditions(reals(1)))
def test_torch_computes_the_same_in_float64(expr: Any, seen: Any) -> None:
    """On index tensors, tensors of the user and plain numbers; nothing passes through float32."""
    values = random_values | {"scores": SCORE_TILE}
    tensors = {
        name: torch.as_tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    heads = {"b": torch.tensor([[values["batch"]]]), "h": torch.tensor([[values["head"]]])}
    scope = {**tensors, **heads, "score": tensors["scores"]}
    for original in (expr, seen):
        as_given = original.xreplace({SCORES: SCORE})
        source = torch_source(as_given)
        found = eval(source, {"torch": torch, "math": math, "dtype": torch.float64}, scope)
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            assert found.dtype == torch.float64, source
        want = expected_of(original, values)
        np.testing.assert_allclose(
            np.broadcast_to(np.asarray(found), want.shape), want, rtol=1e-9, atol=1e-9
        )
