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

from flashgen.kernels.forward_hopper.plan import RANGES
from support.cases import Case, inputs
from support.oracle import Inputs
from support.trials import CONFIGS, SPECS
from support.turns import in_turns
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
        tell, told = module._tell, []

        def told_too(number: Any, outgrown: Any, consumer: int, slot: Any) -> None:
            if int(number) == 1:
                told.append(consumer)
            tell(number, outgrown, consumer, slot)

        monkeypatch.setattr(module, "_tell", told_too)
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


def test_a_small_rise_and_then_a_large_one(redone: Callable[[ModuleType], list[int]]) -> None:
    """A rise below what raises the reference, whose weights add up to more; then one past all.

    The first pass cannot hold it; the second one, which looks at every step, has to.
    """
    name, slack = "causal_d128", RANGES["bfloat16"].slack
    q, k, v = (torch.zeros(1, 1, 257, 128) for _ in range(3))
    torch.manual_seed(0)
    v.normal_()
    base_2 = 2.0**0.5  # of a score of 1, with this scale
    q[..., 0] = 1.0
    k[:, :, 192:256, 0] = (slack - 0.5) / base_2  # 64 keys: together 2^(slack + 5.5)
    k[:, :, 100, 0] = 800.0 / base_2
    case = Case(257, 257, 1, 1, 1, scale=base_2 / 1.4426950408889634)
    again = redone(shipped(name))
    _check(name, (q.bfloat16(), k.bfloat16(), v.bfloat16()), case)
    assert again


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
        assert weights.first + weights.slack <= weights.outgrown < weights.most
        assert weights.first < weights.usual + 1 <= weights.outgrown
        assert 2.0**weights.first >= torch.finfo(getattr(torch, dtype)).tiny * 2.0**14
