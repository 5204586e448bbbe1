"""The Gluon forward kernel where scores are far apart: right, and nearly always computed once.

Each case stands for data that people have: large queries, keys that grow along the sequence, one
key that outweighs all others, the first layer of a sentence encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen.kernels.forward_hopper.weight_range import RANGES
from support.cases import Case, inputs
from support.gluon import interpreted
from support.oracle import Inputs
from support.trials import CONFIGS, SPECS
from support.turns import in_turns
from support.variants import rendered_module
from sweep.hopper import check_hopper, shipped

#: Three consumers with scores of 64 and of 128 keys, two with queries in registers, wide heads;
#: both types; rows whose first tiles hide all keys.
NAMES = (
    *("causal_d128", "causal_d64", "dropout_causal_d64", "causal_d256", "causal_fp16_d128"),
    *("full_d128", "window_d128", "alibi_d128", "documents_d128"),
)


def _times(factor: float) -> Callable[[Inputs], Inputs]:
    return lambda given: (given[0] * factor, *given[1:])


def _keys(factors: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Inputs]:
    def changed(given: Inputs) -> Inputs:
        q, k, v = given
        return q, k * factors(torch.arange(k.shape[2]) / k.shape[2])[:, None], v

    return changed


def _spike(place: int) -> Callable[[Inputs], Inputs]:
    def changed(given: Inputs) -> Inputs:
        q, k, v = given
        k = k.clone()
        k[:, :, place] = 30.0
        return q, k, v

    return changed


#: What becomes of standard normal q, k and v.
DATA: dict[str, Callable[[Inputs], Inputs]] = {
    "x1": _times(1.0),
    "x3": _times(3.0),
    "x16": _times(16.0),
    "x64": _times(64.0),
    "growing": _keys(lambda at: 0.1 + 6.0 * at),
    "shrinking": _keys(lambda at: 6.1 - 6.0 * at),
    "first_key": _spike(0),
    "middle_key": _spike(150),
    "last_key": _spike(-1),
    "some_keys": _keys(lambda at: 1.0 + 60.0 * ((at * 1000).long() % 7 == 0)),
    "values_of_one_sign": lambda given: (given[0] * 4.0, given[1], given[2] + 1000.0),
}


def _case(name: str) -> Case:
    return Case(400, 400, 1, 2, 1, params={"dropout_p": 0.2} if "dropout" in name else {})


def _check(name: str, tensors: Inputs, case: Case) -> None:
    check_hopper(shipped(name), SPECS[name], case, CONFIGS[name][0], tensors)


@pytest.fixture
def redone(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[int]]:
    """Notes the consumers that ask for a tile of queries again."""

    def noted(module: ModuleType) -> list[int]:
        tell, told = module._set_overflow, []

        def told_too(number: Any, overflowed: Any, consumer: int, slot: Any) -> None:
            if int(number) == 1:
                told.append(consumer)
            tell(number, overflowed, consumer, slot)

        monkeypatch.setattr(module, "_set_overflow", told_too)
        return told

    return noted


@pytest.mark.parametrize(("name", "data"), in_turns(NAMES, list(DATA), every=3))
def test_values(name: str, data: str, redone: Callable[[ModuleType], list[int]]) -> None:
    spec, case = SPECS[name], _case(name)
    dtype = getattr(torch, spec.dtype)
    q, k, v = (x.to(dtype) for x in DATA[data](inputs(case, spec, torch.float32)))
    again = redone(shipped(name))
    _check(name, (q, k, v), case)
    once = {"x1", "x3", "values_of_one_sign"}
    if spec.dtype == "bfloat16":
        once |= {"x16", "x64", "growing", "shrinking"}
    if data in once:
        assert again == []


def _with_keys(heights: dict[int, float], values: dict[int, float] | None = None) -> Inputs:
    """q, k and v of `LADDER`: scores of these keys in base 2, which every second row sees at all.

    Scores of all other pairs are 0. Values are normal, those of some keys so many times as large.
    """
    q, k, v = (torch.zeros(1, 1, LADDER.q_len, 128) for _ in range(3))
    torch.manual_seed(0)
    v.normal_()
    q[:, :, ::2, 0] = 1.0
    for key, height in heights.items():
        k[:, :, key, 0] = height / BASE_2
    for key, times in (values or {}).items():
        v[:, :, key] *= times
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


BASE_2 = 2.0**0.5  # of a score of 1, with the scale of these calls
LADDER = Case(257, 257, 1, 1, 1, scale=BASE_2 / 1.4426950408889634)


def test_a_small_rise_and_then_a_large_one(redone: Callable[[ModuleType], list[int]]) -> None:
    """64 weights that are far above the first ones; then one that is past all.

    The first pass cannot hold it; the second one, which looks at every step, has to.
    """
    name = "causal_d128"
    again = redone(shipped(name))
    _check(name, _with_keys(dict.fromkeys(range(192, 256), 23.5) | {100: 800.0}), LADDER)
    assert again


def test_float16_expects_the_first_key_to_be_far_above_the_others(
    redone: Callable[[ModuleType], list[int]],
) -> None:
    """It has no room for such weights; the step that sees the first keys takes new maxima."""
    name = "causal_fp16_d128"
    again = redone(shipped(name))
    q, k, v = (x.half() for x in _with_keys({0: 100.0}))
    _check(name, (q, k, v), LADDER)
    assert again == []


#: Keys far above the others, of which the last step sees the first 64: the heights of some, what
#: their values are times, and whether the tile is computed again. Weights begin at 2^-64.
LATE: dict[str, tuple[dict[int, float], dict[int, float], bool]] = {
    "one": ({3: 170.0}, {}, False),
    "another before it, almost as large": ({100: 150.0, 3: 152.5}, {}, False),
    "past float32": ({3: 200.0}, {}, True),
    "values that were past float32 before": ({100: 185.0}, {100: 2.0**10}, True),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("name", ["full_d128", "causal_d256"])
def test_the_last_keys_are_far_above_the_others(
    name: str, late: str, redone: Callable[[ModuleType], list[int]]
) -> None:
    """They are no reason to compute a tile of queries twice."""
    heights, values, twice = LATE[late]
    again = redone(shipped(name))
    q, k, v = (
        x.repeat(1, 1, 1, SPECS[name].qk_head_dim // 128) for x in _with_keys(heights, values)
    )
    q[..., 128:] = 0.0
    _check(name, (q, k, v), LADDER)
    assert bool(again) == twice


#: What a kernel that lowers such weights could do wrong, and which of `LATE` shows it.
SLIPS = {
    "what was summed up before stays": (
        "acc = (_scale_rows(acc[0], gl.where(large, 2.0**-120, 1.0)),)\n        m_i",
        "m_i",
        "another before it, almost as large",
    ),
    "the weights stay": ("_lowered_pairs(weights[0], large)", "weights[0]", "one"),
    "the reference stays": ("m_i += gl.where(large, 120.0, 0.0)", "m_i += 0.0", "one"),
    "the sum stays": ("total *= gl.where(large, 2.0**-120, 1.0)", "total *= 1.0", "one"),
    "nobody asks what was summed up": (
        "lost += gl.where(begun > 0, _zeros_or_nan(acc[0], ROWS), 0.0)",
        "lost += 0.0",
        "values that were past float32 before",
    ),
    "all rows are lowered": (
        "large, lost = ~(total <= MOST_WEIGHT), total",
        "large, lost = total > 0.0, total",
        "one",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_in_lowering_are_found(slip: str) -> None:
    right, wrong, late = SLIPS[slip]

    def slipped(source: str) -> str:
        assert source.count(right) == 1
        return interpreted(source.replace(right, wrong))

    name = "full_d128"
    module = rendered_module(SPECS[name], name=name, hopper=True, edit_source=slipped)
    heights, values, _ = LATE[late]
    with pytest.raises(AssertionError):
        check_hopper(module, SPECS[name], LADDER, CONFIGS[name][0], _with_keys(heights, values))


#: Where the key is that outweighs all others, and how far above them. The first tile of keys is
#: the last one; after 16 more the sums show such a weight, and references rise by it.
ALONE: dict[str, tuple[int, float]] = {
    "in the first tile": (1250, 40.3),
    "in the last tile": (3, 40.3),
    "before references rise": (900, 28.6),
}


def _check_alone(module: ModuleType, name: str, place: int, height: float) -> None:
    """Rows of one key have that key's value, to the bit: no rounding of its weight remains."""
    spec = SPECS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, spec.qk_head_dim) for rows in (64, 1280, 1280))
    q[..., 0], k[..., 0], k[:, :, place] = torch.rand(64) + 1.0, 0.0, 0.0
    k *= 0.01
    k[:, :, place, 0] = height
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, _ = module._launch_hopper(q, k, v, 1.0, CONFIGS[name][0].as_dict())
    assert torch.equal(out, v[:, :, place : place + 1].expand_as(out))


@pytest.mark.parametrize("name", ["full_d128", "full_d64"])
@pytest.mark.parametrize("alone", ALONE)
def test_a_key_that_outweighs_all_others_gives_its_value(name: str, alone: str) -> None:
    _check_alone(shipped(name), name, *ALONE[alone])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("total / rounded, 1.0)", "1.0, 1.0)"),
        ("m_i + gl.floor(m_new - m_i))", "m_new)"),
    ],
)
def test_slips_in_rounding_are_found(right: str, wrong: str) -> None:
    def slipped(source: str) -> str:
        assert source.count(right) == 1
        return interpreted(source.replace(right, wrong))

    module = rendered_module(SPECS["full_d128"], hopper=True, edit_source=slipped)
    with pytest.raises(AssertionError):
        _check_alone(module, "full_d128", *ALONE["before references rise"])


@pytest.mark.parametrize("above", [8.0, 12.0, 13.25])
@pytest.mark.parametrize("place", [0, 100, 255])
def test_small_weights_of_float16(above: float, place: int) -> None:
    """One key far above the others, whose values are large: together they still count."""
    name = "causal_fp16_d128"
    q, k, v = (torch.zeros(1, 1, 256, 128) for _ in range(3))
    q[..., 0] = 8.0
    k[:, :, place, 0] = above / 8.0
    v[:] = 1000.0
    v[:, :, place] = 0.0
    _check(name, (q.half(), k.half(), v.half()), Case(256, 256, 1, 1, 1, scale=1.0))


def test_every_range_holds_what_it_says() -> None:
    """A reference is raised long before the range ends, and digits are left below the first."""
    for dtype, weights in RANGES.items():
        largest = torch.finfo(getattr(torch, dtype)).max
        assert 2.0**weights.most < largest
        assert weights.first < weights.usual + 1 <= weights.raise_above < weights.most
        assert 2.0**weights.first >= torch.finfo(getattr(torch, dtype)).tiny * 2.0**14
