"""Normalisers: weights and LSE by hand, their identity, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashgen import (
    Float,
    Int,
    Normaliser,
    Tensor,
    sigmoid_attention,
    softmax,
    softmax_off_by_one,
)
from flashgen.errors import MaskError
from flashgen.reference import weigh

SINKS = Tensor("sinks", ("num_q_heads",))
LOGIT = Float("logit", 0.5)

#: Two heads of two rows of three keys; the last row of each sees none.
ROWS = [[1.0, -2.0, -math.inf], [-math.inf] * 3]
SCORES = torch.tensor([[ROWS, ROWS]], dtype=torch.float64)


def by_hand(row: list[float], sink: float | None) -> tuple[list[float], float]:
    total = sum(math.exp(s) for s in row) + (0.0 if sink is None else math.exp(sink))
    if total == 0.0:
        return [0.0] * len(row), -math.inf
    return [math.exp(s) / total for s in row], math.log(total)


@pytest.mark.parametrize(
    ("normaliser", "params", "sinks"),
    [
        (softmax(), {}, (None, None)),
        (softmax(sink=0.25), {}, (0.25, 0.25)),
        (softmax(sink=2), {}, (2, 2)),
        (softmax(sink=LOGIT), {}, (0.5, 0.5)),
        (softmax(sink=LOGIT), {"logit": -1.0}, (-1.0, -1.0)),
        (softmax(sink=SINKS), {"sinks": torch.tensor([3.0, -1.0])}, (3.0, -1.0)),
        (softmax(sink=lambda b, h: LOGIT * h), {}, (0.0, 0.5)),
        (softmax_off_by_one(), {}, (0.0, 0.0)),
    ],
    ids=str,
)
def test_softmax_and_its_sinks(
    normaliser: Normaliser, params: dict[str, Any], sinks: tuple[float | None, ...]
) -> None:
    weights, lse = weigh(SCORES, normaliser, params=params)
    for head, sink in enumerate(sinks):
        for i, row in enumerate(ROWS):
            expected, expected_lse = by_hand(row, sink)
            assert weights[0, head, i].tolist() == pytest.approx(expected)
            assert lse[0, head, i].item() == pytest.approx(expected_lse)
    # A row that sees nothing: nothing but the sink.
    assert not weights[:, :, 1].any()


def test_a_sink_for_each_head_of_each_sequence() -> None:
    table = Tensor("sinks", ("batch", "num_q_heads"))
    scores = torch.zeros(2, 2, 1, 1, dtype=torch.float64)
    sinks = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    _, lse = weigh(scores, softmax(sink=lambda b, h: table[b, h]), params={"sinks": sinks})
    torch.testing.assert_close(lse[..., 0], torch.log1p(torch.exp(sinks.double())))


def test_sigmoid_weighs_each_key_by_itself() -> None:
    weights, lse = weigh(SCORES, sigmoid_attention())
    seen = [1 / (1 + math.exp(-s)) for s in ROWS[0][:2]]
    assert weights[0, 1, 0].tolist() == pytest.approx([*seen, 0.0])
    assert lse[0, 1, 0].item() == pytest.approx(math.log(sum(seen)))
    assert not weights[0, 0, 1].any() and lse[0, 0, 1] == -math.inf
    _, lse = weigh(torch.full((1, 1, 1, 1), -800.0), sigmoid_attention())
    assert lse.item() == -800.0


def test_normalisers_are_equal_when_they_do_the_same() -> None:
    assert softmax(sink=0.0) == softmax_off_by_one() and softmax(sink=0) == softmax_off_by_one()
    assert hash(softmax(sink=0.0)) == hash(softmax_off_by_one())
    different = [softmax(), softmax(sink=0.0), softmax(sink=1.0), softmax(sink=LOGIT)]
    different += [softmax(sink=SINKS), sigmoid_attention(), softmax(sink=Float("logit", 1.0))]
    assert len(set(different)) == len(different)
    assert softmax() != "softmax()"


def test_parameters_and_labels() -> None:
    assert softmax().params == sigmoid_attention().params == ()
    assert [p.name for p in softmax(sink=SINKS).params] == ["sinks"]
    assert repr(softmax(sink=SINKS)) == "softmax(sink=sinks)"
    assert repr(softmax(sink=LOGIT)) == "softmax(sink=logit)"
    assert repr(softmax(sink=1.5)) == "softmax(sink=1.5)"
    assert repr(softmax()) == "softmax()"
    assert repr(softmax_off_by_one()) == "softmax_off_by_one()"


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (math.inf, r"softmax: sink=inf; give a finite number"),
        (math.nan, r"softmax: sink=nan; give a finite number"),
        (True, r"softmax: sink=True; give a finite number"),
        ("h", r"softmax: sink='h'; give a finite number"),
        (Int("sink", 1), r"softmax: sink=Int\('sink', 1, min=0\); give a finite number"),
        (
            Tensor("sinks", ("kv_len",)),
            r"softmax: sink=Tensor\('sinks', \(kv_len\), 'float32', sorted=False\); "
            r"its dimensions can be batch, num_q_heads and 1",
        ),
        (Tensor("sinks", ("num_q_heads",), "int32"), r"softmax: sink=Tensor"),
    ],
)
def test_what_a_sink_cannot_be(sink: Any, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        softmax(sink=sink)


def test_a_sink_is_a_number() -> None:
    with pytest.raises(MaskError, match=r"softmax\(sink=<lambda>\): its sink is .*, not a number"):
        softmax(sink=lambda b, h: h > 2).params  # noqa: B018
