"""Feature maps of whole vectors in a spec: what they trace to, what is refused and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    elu_plus_one,
    favor,
    feature_sum,
    full,
    linear,
    relu,
    softmax_features,
    sqrt,
    where,
)
from flashgen.feature_maps import ELEMENT, as_feature_map
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.plan.linear import LinearPlan
from flashgen.plan.vectors import VectorProgram
from flashgen.validate import validate
from support.vector_maps import both_signs, standardised

NAMED = Tensor("matrix", ("batch", "num_kv_heads", "kv_len"))
GOOD = AttentionSpec(64, mask=causal(), normaliser=linear(favor()))


def findings(**fields: Any) -> list[str]:
    variant = Variant("tiny", replace(GOOD, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": full(), "head_dim": (128, 96)},
        {"normaliser": linear(favor(40)), "head_dim": (24, 72)},
        {"normaliser": linear(softmax_features(), normalise=False)},
        {"normaliser": linear(both_signs), "head_dim": (128, 40)},
        {"normaliser": linear(standardised), "head_dim": 24},
        {"normaliser": linear(favor(), decay=lambda h: -h)},
    ],
)
def test_good_fields(fields: dict[str, Any]) -> None:
    assert findings(**fields) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normaliser": linear(favor(20))}, "normaliser=linear(favor(features=20)): "
         "favor(features=20): features=20; write a multiple of 8 from 16 on"),
        ({"normaliser": linear(favor(192))}, "normaliser=linear(favor(features=192)): 192 features "
         "of a vector: kernels are for at most 128, or a multiple of it up to 1024; change their "
         "number, or head_dim"),
        ({"normaliser": linear(both_signs), "head_dim": 96}, "normaliser=linear(both_signs): 192 "
         "features of a vector: kernels are for at most 128, or a multiple of it up to 1024; "
         "change their number, or head_dim"),
        ({"normaliser": linear(favor(), normalise=False)}, "normaliser=linear("
         "favor(features=256), normalise=False): random features are divided by their largest, "
         "which cancels in normalised weights only; leave normalise=False out"),
        ({"normaliser": linear(favor(), decay=NAMED)},
         "params=Tensor('matrix', (batch, num_kv_heads, kv_len), 'float32', sorted=False): "
         "parameter 'matrix' is a name that the generated module uses; rename the parameter, to "
         "matrix_ for one"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    assert findings(**fields) == [f"specs/tiny.py: tiny: {message}"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: [x, x > 0], "feature_map feature_map returned the condition `x > 0`"),
        (lambda x: [x, None], "feature_map feature_map returned None, not a number"),
        (lambda x: feature_sum(x * x), "which is the same for all elements of a vector; return a "
         "feature of each element"),
        (lambda x: x.softmax(-1), "softmax"),
    ],
)  # fmt: skip
def test_what_is_no_feature_map(function: Any, message: str) -> None:
    [finding] = findings(normaliser=linear(function))
    assert message in finding


@pytest.mark.parametrize(
    ("function", "never"),
    [
        (softmax_features(), True),
        (favor(), True),
        (both_signs, True),
        (lambda x: where(x > 0.0, x, 0.0) / sqrt(feature_sum(x * x) + 1e-6), True),
        (lambda x: x * feature_sum(x * x), False),
        (lambda x: [x * x, x], False),
        (lambda x: x * x * feature_sum(x), False),
    ],
)
def test_what_is_never_negative(function: Any, never: bool) -> None:
    assert as_feature_map(function).never_negative == never


def test_maps_are_told_apart_by_what_they_compute() -> None:
    maps = [relu(), elu_plus_one(), softmax_features(), favor(), favor(64)]
    maps += map(as_feature_map, (both_signs, standardised, lambda x: [-x, x], lambda x: [x, -x]))
    assert len({as_feature_map(x) for x in maps}) == len(maps)
    assert softmax_features() == softmax_features()


def test_gradients_of_sums_are_those_of_sympy() -> None:
    """For vectors of two elements, whose sums are written out."""
    traced = as_feature_map(lambda x: [x / feature_sum(x * x), x * feature_sum(x)]).traced
    a, b, g, h = sympy.symbols("a b g h", real=True)
    squares, total = (s.symbol for s in traced.sums)
    written = {squares: a * a + b * b, total: a + b}
    # What a kernel adds up for element a, of gradients g of piece 0 and h of piece 1 in element b.
    program = VectorProgram(traced)
    by_sums = {x.name: x for x in program.gradients}
    names = {"grad_1": h, "grad_0": g, "x": b, squares.name: squares, total.name: total}
    found = sum(
        sympy.sympify(x.terms, names) * sympy.sympify(x.slope, {"x": a}) for x in by_sums.values()
    )
    value = sum(
        gradient * piece.xreplace({ELEMENT: b}).xreplace(written)
        for gradient, piece in zip((g, h), traced.pieces, strict=True)
    )
    assert sympy.simplify(found.xreplace(written) - sympy.diff(value, a)) == 0


def test_tiles_hold_no_more_than_registers_do() -> None:
    plan = LinearPlan(lower(GOOD, "tiny"))
    assert (plan.qk_width, plan.of_tiles.qk_width, plan.num_tiles) == (256, 128, 2)
    small = LinearPlan(lower(replace(GOOD, normaliser=linear(favor(128))), "tiny"))
    assert not small.tiled and small.of_tiles.qk_width == 128
