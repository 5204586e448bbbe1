"""Score functions: what each computes, how they compose, their identity, what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Score,
    Tensor,
    additive_bias,
    alibi,
    full,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
)
from flashgen.errors import MaskError
from flashgen.reference import final_scores
from flashgen.scores import as_score

CAP = Float("cap", 30.0, above=0)
SLOPES = Tensor("slopes", ("num_q_heads",))


def added(
    score: Score, q_len: int = 4, kv_len: int = 4, heads: int = 1, **params: Any
) -> torch.Tensor:
    """What is added to scores of 0: (heads, q_len, kv_len)."""
    nothing = torch.zeros(1, heads, q_len, kv_len, dtype=torch.float64)
    return final_scores(nothing, full(), score, params=params)[0]


def applied(score: Score, value: float, **params: Any) -> float:
    """What becomes of one score."""
    one = torch.full((1, 1, 1, 1), value, dtype=torch.float64)
    return final_scores(one, full(), score, params=params).item()


def test_softcap_squashes_into_its_cap() -> None:
    assert applied(softcap(30), 45.0) == pytest.approx(30 * math.tanh(1.5))
    assert applied(softcap(CAP), -3.0) == pytest.approx(-30 * math.tanh(0.1))
    assert applied(softcap(CAP), 100.0, cap=2.0) == pytest.approx(2.0)
    assert applied(softcap(SLOPES), 1.0, slopes=torch.tensor([5.0])) == pytest.approx(
        5 * math.tanh(0.2)
    )


def test_a_temperature_divides() -> None:
    assert applied(temperature(4), 3.0) == 0.75
    assert applied(temperature(SLOPES), 3.0, slopes=torch.tensor([1.5])) == 2.0
    assert applied(temperature(Float("t", above=0)), 3.0, t=2.0) == 1.5


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibis_slopes_are_those_of_its_authors(heads: int) -> None:
    def of_a_power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    nearest = 2 ** math.floor(math.log2(heads))
    expected = of_a_power_of_two(nearest)
    expected += of_a_power_of_two(2 * nearest)[0::2][: heads - nearest]
    bias = added(alibi(heads), heads=heads)
    torch.testing.assert_close(bias[:, 0, 1], torch.tensor(expected, dtype=torch.float64))


def test_alibi_counts_the_distance() -> None:
    slopes = torch.tensor([0.5])
    assert added(alibi(SLOPES), 3, 3, slopes=slopes)[0].tolist() == [
        [0, 0.5, 1],
        [-0.5, 0, 0.5],
        [-1, -0.5, 0],
    ]
    both = added(alibi(SLOPES, bidirectional=True), 2, 2, slopes=slopes)
    assert both[0].tolist() == [[0, -0.5], [-0.5, 0]]
    last = added(alibi(SLOPES, align="bottom_right"), 1, 3, slopes=slopes)
    assert last[0].tolist() == [[-1, -0.5, 0]]
    first = added(alibi(SLOPES, align="top_left"), 1, 3, slopes=slopes)
    assert first[0].tolist() == [[0, 0.5, 1]]


def test_a_bias_for_each_clipped_distance() -> None:
    table = torch.tensor([[1.0, 2, 3, 4, 5], [10, 20, 30, 40, 50]])
    score = relative_bias(2, align="bottom_right")
    assert added(score, 1, 5, heads=2, relative_bias=table)[:, 0].tolist() == [
        [1, 1, 1, 2, 3],
        [10, 10, 10, 20, 30],
    ]
    score = relative_bias(Int("reach"), align="top_left")
    bias = added(score, 1, 5, heads=2, relative_bias=table, reach=2)
    assert bias[0, 0].tolist() == [3, 4, 5, 5, 5]
    turned = relative_bias(2, Tensor("table", (5, "num_q_heads")), align="top_left")
    assert torch.equal(added(turned, 1, 5, heads=2, table=table.T), bias)
    alone = relative_bias(2, Tensor("table", (5,)), align="top_left")
    assert added(alone, 1, 5, heads=2, table=table[0])[1, 0].tolist() == [3, 4, 5, 5, 5]


def hugging_face_bucket(
    relative_position: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """The rule of T5's bucket function, by its own float32 logarithm."""
    bucket = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        bucket += (relative_position > 0) * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    exact = num_buckets // 2
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return bucket + torch.where(distance < exact, distance, large)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (64, 128), (16, 20), (8, 1000), (6, 50), (4, 3)]
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5s_buckets_are_t5s(
    bidirectional: bool, num_buckets: int, max_distance: int, dtype: torch.dtype
) -> None:
    length = 1500
    score = t5_bias(
        num_buckets=num_buckets,
        max_distance=max_distance,
        bidirectional=bidirectional,
        align="top_left",
    )
    table = torch.arange(num_buckets, dtype=torch.float64)[:, None]
    bias = final_scores(
        torch.zeros(1, 1, length, 2, dtype=dtype),
        full(),
        score,
        params={"relative_attention_bias": table},
    )
    before = hugging_face_bucket(
        torch.arange(2) - torch.arange(length)[:, None], bidirectional, num_buckets, max_distance
    )
    assert torch.equal(bias[0, 0].long(), before)
    bias = final_scores(
        torch.zeros(1, 1, 1, length, dtype=dtype),
        full(),
        score,
        params={"relative_attention_bias": table},
    )
    after = hugging_face_bucket(torch.arange(length), bidirectional, num_buckets, max_distance)
    assert torch.equal(bias[0, 0, 0].long(), after)


def test_t5_takes_its_table_as_hugging_face_has_it() -> None:
    table = torch.randn(32, 3, dtype=torch.float64)
    bias = added(t5_bias(), heads=3, relative_attention_bias=table)
    assert torch.equal(bias[:, 2, 2], table[0]) and torch.equal(bias[:, 2, 1], table[1])
    assert torch.equal(bias[:, 1, 2], table[17])
    turned = t5_bias(Tensor("weight", ("num_q_heads", 32)))
    assert torch.equal(added(turned, heads=3, weight=table.T), bias)


def test_a_bias_of_any_dimensions() -> None:
    everything = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    assert torch.equal(added(additive_bias(), 3, 4, 2, bias=everything), everything[0])
    padding = additive_bias(Tensor("padding", ("batch", 1, 1, "kv_len")))
    row = torch.tensor([[[[0.0, 1.0, -math.inf, 2.0]]]])
    assert added(padding, 3, 4, 2, padding=row).tolist() == [[[0, 1, -math.inf, 2]] * 3] * 2


def test_score_functions_compose_in_order() -> None:
    score = softcap(2).then(lambda score, b, h, q_idx, kv_idx: score + h).then(temperature(4))
    assert score.label == "softcap(2).then(score).then(temperature(4))"
    assert applied(score, 1.0) == pytest.approx(2 * math.tanh(0.5) / 4)
    assert [p.name for p in softcap(CAP).then(alibi(SLOPES)).params] == ["cap", "slopes"]
    # Biases are not capped unless the cap comes last.
    assert softcap(2).then(alibi(8)) != alibi(8).then(softcap(2))


def test_only_distances_of_unstated_alignment_need_equal_lengths() -> None:
    stated = alibi(8, align="top_left")
    for score in (
        alibi(8),
        relative_bias(2),
        t5_bias(),
        alibi(8).then(stated),
        stated.then(alibi(8)),
    ):
        assert score.equal_lengths
        assert AttentionSpec(64, score=score).equal_lengths
    for score in (stated, softcap(2), additive_bias(), stated.then(softcap(2))):
        assert not score.equal_lengths
        assert not AttentionSpec(64, score=score).equal_lengths
    with pytest.raises(ValueError, match=r"alibi\(8\) needs q_len == kv_len, got 2 and 3"):
        added(alibi(8), 2, 3)


def test_scores_are_equal_when_they_compute_the_same() -> None:
    mine = as_score(lambda score, b, h, q_idx, kv_idx: 30 * torch.tanh(score / 30))
    assert mine == softcap(30) and hash(mine) == hash(softcap(30))
    assert softcap(30) != softcap(20) and softcap(CAP) != softcap(Float("cap", 20.0, above=0))
    assert alibi(8) != alibi(8, align="top_left")  # one demands equal lengths
    assert softcap(30) != "softcap(30)"


@pytest.mark.parametrize(
    ("score", "label"),
    [
        (softcap(CAP), "softcap(cap)"),
        (alibi(8), "alibi(8)"),
        (alibi(SLOPES, align="top_left"), "alibi(slopes, align='top_left')"),
        (alibi(8, bidirectional=True), "alibi(8, bidirectional=True)"),
        (relative_bias(64), "relative_bias(64)"),
        (
            t5_bias(bidirectional=False),
            "t5_bias(num_buckets=32, max_distance=128, bidirectional=False)",
        ),
        (additive_bias(Tensor("mine", ("kv_len",))), "additive_bias(mine)"),
        (as_score(lambda score, b, h, q_idx, kv_idx: score), "score"),
    ],
    ids=str,
)
def test_a_label_is_what_a_person_writes(score: Score, label: str) -> None:
    assert repr(score) == label


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: softcap(0),
            "softcap: cap=0; give a positive number of 32 bits, a Float declared with above=0 or a "
            "Tensor of floats",
        ),
        (lambda: softcap(1e-39), "softcap: cap=1e-39; give a positive number of 32 bits"),
        (lambda: softcap(1e39), "softcap: cap=1e+39; give a positive number of 32 bits"),
        (lambda: softcap(10**400), "give a positive number of 32 bits"),
        (lambda: temperature(1e-39), "temperature: value=1e-39; give a positive number of 32 bits"),
        (
            lambda: softcap(Float("cap", 30.0)),
            "softcap: cap=Float('cap', 30.0, above=None); give a positive number of 32 bits, a "
            "Float declared with above=0",
        ),
        (
            lambda: temperature(Float("t", above=-1)),
            "a Float declared with above=0 or a Tensor of floats",
        ),
        (lambda: softcap(math.inf), "softcap: cap=inf; give a positive number"),
        (
            lambda: softcap(Int("cap", 3)),
            "softcap: cap=Int('cap', 3, min=0); give a positive number",
        ),
        (
            lambda: temperature(Tensor("t", ("kv_len",))),
            "temperature: value=Tensor('t', (kv_len), 'float32', sorted=False); "
            "its dimensions can be batch, num_q_heads and 1",
        ),
        (lambda: alibi(0), "alibi: slopes=0; give the number of query heads or a Tensor"),
        (lambda: alibi(8, align="right"), "align='right': unknown; choose None, 'top_left' or"),
        (
            lambda: alibi(Tensor("slopes", ("num_q_heads",), "int32")),
            "sorted=False); give the number of query heads or a Tensor of floats",
        ),
        (lambda: relative_bias(0), "relative_bias: max_distance=0; give a number from 1 up, or an"),
        (lambda: relative_bias(-3), "relative_bias: max_distance=-3; give a number from 1 up, or"),
        (
            lambda: relative_bias(8, 3),
            "relative_bias: table=3; give a declared tensor, as "
            "Tensor('bias', ('num_q_heads', 17))",
        ),
        (
            lambda: relative_bias(8, Tensor("table", ("num_q_heads", 16))),
            "relative_bias: table=Tensor('table', (num_q_heads, 16), 'float32', sorted=False); "
            "declare it with 17 entries in place of 16",
        ),
        (
            lambda: relative_bias(1, Constant("near", [0.5, 1.0, 2.0, 3.0])),
            "declare it with 3 entries in place of 4",
        ),
        (
            lambda: t5_bias(Tensor("table", (64, "num_q_heads"))),
            "declare it with 32 entries in place of 64",
        ),
        (lambda: t5_bias(3), "t5_bias: table=3; give a declared tensor, as Tensor("),
        (lambda: t5_bias(num_buckets="a"), "t5_bias: num_buckets='a' max_distance=128; give an"),
        (lambda: t5_bias(max_distance="a"), "t5_bias: num_buckets=32 max_distance='a'; give an"),
        (
            lambda: additive_bias(3),
            "additive_bias: bias=3; give a declared tensor, as "
            "Tensor('bias', ('batch', 'num_q_heads', 'q_len', 'kv_len'))",
        ),
        (lambda: additive_bias("b"), "additive_bias: bias='b'; give a declared tensor"),
        (lambda: additive_bias([[1.0]]), "additive_bias: bias=[[1.0]]; give a declared tensor"),
        (lambda: relative_bias(2.5), "relative_bias: max_distance=2.5; give a whole number"),
        (
            lambda: relative_bias(Tensor("reach", ("batch",), "int32")),
            "sorted=False); give a number or an Int",
        ),
        (
            lambda: relative_bias(2, Tensor("table", ("num_q_heads", 5), "int32")),
            "relative_bias: table=Tensor('table', (num_q_heads, 5), 'int32', sorted=False); "
            "declare it with a float dtype, one dimension for the distances, and batch or "
            "num_q_heads beside it",
        ),
        (lambda: t5_bias(Tensor("table", ("num_q_heads",))), "t5_bias: table=Tensor('table'"),
        (
            lambda: t5_bias(num_buckets=7),
            "t5_bias: num_buckets=7 max_distance=128; give an even number of buckets from 4 up",
        ),
        (lambda: t5_bias(max_distance=8), "and a distance above a quarter of it"),
        (
            lambda: additive_bias(Tensor("bias", ("batch",), "int32")),
            "additive_bias: bias=Tensor('bias', (batch), 'int32', sorted=False); "
            "declare it with a float dtype",
        ),
        (
            lambda: additive_bias(Tensor("bias", (None, "kv_len"))),
            "its dimensions can be batch, num_q_heads, q_len, kv_len and 1",
        ),
        (lambda: as_score(3), "score=3 is no score function; give a function (score, b, h, q_idx,"),
    ],
)
def test_what_a_score_cannot_be_made_of_is_refused(
    declare: Callable[[], Any], message: str
) -> None:
    with pytest.raises(MaskError) as caught:
        declare()
    assert message in str(caught.value)


def test_tables_of_unknown_size_are_taken() -> None:
    relative_bias(8, Tensor("table", ("num_q_heads", None)))
    relative_bias(Int("reach"), Tensor("table", ("num_q_heads", 17)))
    t5_bias(Tensor("table", ("num_q_heads", None)))


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: a & b,
        lambda a, b: a - 1,
        lambda a, b: (lambda score, *at: score) + a,
    ],
)
def test_scores_are_joined_by_then_alone(join: Callable[..., Any]) -> None:
    with pytest.raises(MaskError) as caught:
        join(softcap(30.0), alibi(8))
    assert str(caught.value).endswith(
        "the score softcap(30.0) is given to an operator, and scores have none; "
        "write first.then(second), where second is given what first returns"
    )


@pytest.mark.parametrize(
    "ask",
    [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a, lambda a, b: 1 if a else b],
)
def test_a_score_is_neither_true_nor_false(ask: Callable[..., Any]) -> None:
    with pytest.raises(MaskError) as caught:
        ask(softcap(30.0), alibi(8))
    assert str(caught.value).endswith(
        "the score softcap(30.0) is neither true nor false; write first.then(second) to apply "
        "both, and `is None` to ask whether there is one"
    )


def test_arguments_in_another_order_are_refused() -> None:
    def turned(score: Any, b: Any, h: Any, kv_idx: Any, q_idx: Any) -> Any:
        return score - (q_idx - kv_idx)

    said = (
        r"score turned takes \(score, b, h, kv_idx, q_idx\), and its argument `kv_idx` would be "
        r"q_idx; name them in the order \(score, b, h, q_idx, kv_idx\)"
    )
    for declare in (lambda: as_score(turned).traced, lambda: softcap(30.0).then(turned)):
        with pytest.raises(MaskError, match=said):
            declare()
    with pytest.raises(MaskError, match=r"score late takes .*, and its argument `batch` would be"):
        as_score(late).traced  # noqa: B018


def late(batch: Any, head: Any, token_q: Any, token_kv: Any, score: Any) -> Any:
    return score


@pytest.mark.parametrize(
    ("score_mod", "message"),
    [
        (
            lambda score, b, h, q_idx, kv_idx: q_idx >= kv_idx,
            "score returned the condition `q_idx >= kv_idx`, not a number; return a number, "
            "as where(condition, score, -inf) for a condition",
        ),
        (lambda score, b, h, q_idx, kv_idx: None, "score returned None, not a number"),
        (lambda score: score, "a score is a function (score, b, h, q_idx, kv_idx) of symbols"),
        (
            lambda score, b, h, q_idx, kv_idx: score if q_idx >= kv_idx else 0.0,
            "the truth of `q_idx >= kv_idx` is not known while the function is traced",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: score * torch.tensor([1.0, 2.0]),
            "`*` was given a torch.Tensor",
        ),
        (
            lambda score, b, h, q_idx, kv_idx: torch.erfinv(score),
            "torch's `erfinv` cannot be traced; known are the operators and functions of ",
        ),
    ],
)
def test_a_score_that_does_not_trace_says_why(score_mod: Callable[..., Any], message: str) -> None:
    with pytest.raises(MaskError) as caught:
        assert as_score(score_mod).canonical
    assert message in str(caught.value)
