"""The Gluon kernels of every shipped variant, as they stand, on the CPU against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen import Int
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.tuning.hopper_space import hopper_space, rank_hopper
from support.cases import Case, around_tiles
from support.variants import shipped_specs
from sweep.hopper import check_hopper, check_hopper_backward, shipped

SPECS = shipped_specs()
PLANS = {name: lower(spec, name) for name, spec in SPECS.items()}
CONFIGS = {name: rank_hopper(plan, hopper_space(plan).candidates) for name, plan in PLANS.items()}
FORWARD = [name for name, configs in CONFIGS.items() if configs]
WITHOUT = {"causal_fp32_d64"}
TILES = {name: HopperBackward(backward_plan(plan)) for name, plan in PLANS.items()}
BACKWARD = [name for name, tiles in TILES.items() if not tiles.why_not]

HEADS = ((1, 1, 1), (2, 2, 1), (1, 4, 2), (1, 3, 3))
LAYOUTS = ("contiguous", "transposed", "padded", "every_other_row")


def test_nothing_is_left_out() -> None:
    assert set(SPECS) - set(FORWARD) == WITHOUT
    assert set(SPECS) - set(BACKWARD) == WITHOUT


def _cases(name: str, block_m: int, block_n: int) -> Iterator[Case]:
    """Lengths beside the multiples of the tiles' sides; heads and layouts take turns."""
    equal = SPECS[name].equal_lengths
    edges = [
        (case.q_len, case.kv_len) for case in around_tiles(block_m, block_n, equal_lengths=equal)
    ]
    long = [(600, 600)] + [(257, 450), (450, 257)] * (not equal)
    for i, (q_len, kv_len) in enumerate(edges + long):
        yield Case(q_len, kv_len, *HEADS[i % len(HEADS)], LAYOUTS[i % len(LAYOUTS)])


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    config = CONFIGS[name][0]
    for case in _cases(name, config.BLOCK_M, config.BLOCK_N):
        check_hopper(shipped(name), SPECS[name], case, config)


@pytest.mark.parametrize("name", FORWARD)
def test_every_configuration(name: str) -> None:
    """That a build may choose: tiles and stages of each kind."""
    for config in CONFIGS[name]:
        for length in (1, config.BLOCK_M + 1, 500):
            case = Case(length, length, 2, 4, 2)
            check_hopper(shipped(name), SPECS[name], case, config)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    tiles = TILES[name]
    for case in _cases(name, tiles.block_m, tiles.block_n):
        check_hopper_backward(shipped(name), SPECS[name], case)


@pytest.mark.parametrize("name", ["causal_d128", "window_d128", "full_d64", "causal_d256"])
def test_every_remainder(name: str) -> None:
    """By the sides of all tiles, which are of 64, 128 and 192."""
    spec, config = SPECS[name], CONFIGS[name][0]
    for r in range(config.BLOCK_M):
        q_len, kv_len = 64 + r, 64 + r if spec.equal_lengths else 30 + 7 * r % 128
        case = Case(q_len, kv_len)
        check_hopper(shipped(name), spec, case, config)
        if r % 3 == 0:
            check_hopper_backward(shipped(name), spec, case)


PARAMS = [
    (name, param.name, value)
    for name in FORWARD
    for param in SPECS[name].params
    if isinstance(param, Int)
    for value in (param.min, param.min + 1, 64, 100, 10**6)
]


@pytest.mark.parametrize(("name", "param", "value"), PARAMS)
def test_params(name: str, param: str, value: int) -> None:
    lengths = ((300, 300),) if SPECS[name].equal_lengths else ((300, 300), (200, 330), (330, 200))
    for q_len, kv_len in lengths:
        case = Case(q_len, kv_len, 1, 2, 2, params={param: value})
        check_hopper(shipped(name), SPECS[name], case, CONFIGS[name][0])
        check_hopper_backward(shipped(name), SPECS[name], case)
