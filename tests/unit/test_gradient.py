"""Derivatives of score functions: held to finite differences, and a few to what they look like."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import sympy

from flashgen import (
    AttentionSpec,
    Tensor,
    clamp,
    exp,
    full,
    log,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tanh,
    truncate,
    where,
)
from flashgen.plan.code import finite_score
from flashgen.symbolic.gradient import derivative, element_derivatives, score_derivative
from flashgen.symbolic.printer import plain_source
from flashgen.symbols import Load, evaluate
from support.vocabulary import VOCABULARY

STEP = 1e-6
BIAS = Tensor("bias", ("num_q_heads",))
SIZES = {"q_len": 20, "kv_len": 30}


def traced(score_mod: Any) -> Any:
    spec = AttentionSpec(head_dim=64, mask=full(), score=score_mod)
    return finite_score(spec.score)[0]


class Elements:
    """A tensor of any shape: each index has a value of its own, which one of them may change."""

    def __init__(self, seed: str, whole: bool) -> None:
        self.seed, self.whole = seed, whole
        self.moved: dict[tuple[int, ...], float] = {}

    def __getitem__(self, index: tuple[int, ...]) -> float:
        generator = random.Random(f"{self.seed}{index}")
        if self.whole:
            return generator.randrange(10)
        return generator.uniform(0.5, 2.0) + self.moved.get(index, 0.0)


def _values(expr: Any, turn: int) -> dict[str, Any]:
    """Something for every symbol of an expression."""
    generator = random.Random(turn)
    tensors = {load.args[0] for load in expr.atoms(Load)}
    values: dict[str, Any] = {
        symbol.name: generator.randrange(1, 9) if symbol.is_integer else generator.uniform(0.3, 4)
        for symbol in sorted(expr.free_symbols, key=str)
        if symbol not in tensors
    }
    values |= {tensor.name: Elements(tensor.name, tensor.is_integer) for tensor in tensors}
    positions = {"q_idx": generator.randrange(20), "kv_idx": generator.randrange(30)}
    return values | SIZES | positions | {"score": generator.gauss(0, 2)}


@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("name", [name for name, e in VOCABULARY.items() if e.score is not None])
def test_every_score_of_the_vocabulary(name: str, turn: int) -> None:
    spec = VOCABULARY[name].spec("float32")
    expr = finite_score(spec.score)[0]
    values = _values(expr, turn)

    def moved(by: float) -> float:
        return evaluate(expr, values | {"score": values["score"] + by})

    slope = evaluate(score_derivative(expr), values)
    assert slope == pytest.approx((moved(STEP) - moved(-STEP)) / (2 * STEP), rel=1e-4, abs=1e-6)

    learned = [p.name for p in spec.params if isinstance(p, Tensor) and "float" in p.dtype]
    for item in element_derivatives(expr, learned):
        elements = values[item.tensor]
        place = tuple(evaluate(index, values) for index in item.indices)
        ends = []
        for by in (STEP, -STEP):
            elements.moved = {place: by}
            ends.append(evaluate(expr, values))
        elements.moved = {}
        slope = evaluate(item.partial, values)
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, kv: s,
        lambda s, b, h, q, kv: s + truncate(BIAS[h]),
        lambda s, b, h, q, kv: where(BIAS[h] < 1, s, 2 * s),
    ],
)
def test_a_tensor_that_is_not_read_or_only_decides_has_no_derivative(score_mod: Any) -> None:
    assert element_derivatives(traced(score_mod), ["bias"]) == ()


SLOPES: list[tuple[Any, Any]] = [
    (lambda s, b, h, q, kv: s, lambda s: 1),
    (lambda s, b, h, q, kv: 3 * tanh(s / 3), lambda s: 1 - math.tanh(s / 3) ** 2),
    (lambda s, b, h, q, kv: where(kv < 3, 2 * s, s), lambda s: 1),
    (lambda s, b, h, q, kv: where(s < 1, 2 * s, s + 1), lambda s: 2 if s < 1 else 1),
    (lambda s, b, h, q, kv: maximum(s, 0), lambda s: float(s >= 0)),
    (lambda s, b, h, q, kv: minimum(5, maximum(s, -5)), lambda s: float(abs(s) <= 5)),
    (lambda s, b, h, q, kv: abs(s), lambda s: (s > 0) - (s < 0)),
    (lambda s, b, h, q, kv: s * sigmoid(s), lambda s: _sigmoid(s) * (1 + s * (1 - _sigmoid(s)))),
    (lambda s, b, h, q, kv: sqrt(s * s + 1), lambda s: s / math.sqrt(s * s + 1)),
    (lambda s, b, h, q, kv: log(s * s + 1), lambda s: 2 * s / (s * s + 1)),
    (
        lambda s, b, h, q, kv: exp(-s * s) + sin(s),
        lambda s: -2 * s * math.exp(-s * s) + math.cos(s),
    ),
    (lambda s, b, h, q, kv: s + truncate(s), lambda s: 1),
]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("number", range(len(SLOPES)))
def test_the_slope(number: int) -> None:
    score_mod, right = SLOPES[number]
    slope = score_derivative(traced(score_mod))
    for i in range(-40, 41):
        score = i / 4 + 0.01
        found = evaluate(slope, SIZES | {"score": score, "q_idx": 3, "kv_idx": 9})
        assert found == pytest.approx(right(score), abs=1e-12)


def test_a_slope_shares_what_the_score_computes() -> None:
    cap = traced(lambda s, b, h, q, kv: 30 * tanh(s / 30))
    assert plain_source(score_derivative(cap)) == "1 - tanh(score / 30) * tanh(score / 30)"


def test_the_slope_of_a_sigmoid_is_made_of_the_sigmoid() -> None:
    """Of ``exp(-s) / (1 + exp(-s)) ** 2`` floats make infinity over infinity far below 0."""
    slope = score_derivative(traced(lambda s, b, h, q, kv: sigmoid(s)))
    assert plain_source(slope) == "(1 - 1 / (exp(-score) + 1)) / (exp(-score) + 1)"


def test_at_a_kink() -> None:
    """As torch has it of clamp and of abs."""
    at = SIZES | {"score": 0.0, "q_idx": 0, "kv_idx": 0}
    absolute = traced(lambda s, b, h, q, kv: abs(s))
    assert evaluate(score_derivative(absolute), at) == 0
    for limit in (maximum, minimum):
        limited = traced(lambda s, b, h, q, kv: limit(s, 0))  # noqa: B023
        assert evaluate(score_derivative(limited), at) == 1


def test_a_key_that_the_logarithm_of_0_hides_has_no_slope() -> None:
    for cut in (lambda s: maximum(s, 0), lambda s: where(s > 0, s, 0), lambda s: clamp(s, 0, 1)):
        slope = score_derivative(traced(lambda s, b, h, q, kv: s + log(cut(s))))  # noqa: B023
        at = SIZES | {"q_idx": 0, "kv_idx": 0}
        assert evaluate(slope, at | {"score": -0.5}) == 1
        assert evaluate(slope, at | {"score": 0.5}) == 3


def test_a_choice_is_constant_in_its_condition() -> None:
    x, y = sympy.symbols("x y", real=True)
    choice = sympy.Piecewise((x * x, x > y), (y, True))
    slope = derivative(choice, x)
    for at, right in ((2, 4), (0, 0)):
        assert evaluate(slope, {"x": at, "y": 1}) == right
