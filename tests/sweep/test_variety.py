"""Masks, scores and head dimensions beyond the shipped variants, rendered on the spot."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from support.cases import LAYOUTS, Case
from support.turns import in_turns
from support.variants import rendered_module
from support.variety import HEAD_DIM_SPECS, MASK_SPECS, SCORE_SPECS
from sweep.launch import check_kernel

LENGTHS = [(1, 1), (16, 16), (33, 33), (49, 49), (70, 70), (19, 75), (75, 19), (64, 1), (1, 64)]


@functools.cache
def _module(kind: str, name: str) -> ModuleType:
    specs = {"mask": MASK_SPECS, "score": SCORE_SPECS, "dim": HEAD_DIM_SPECS}
    return rendered_module(specs[kind][name])


CALLS = [(*lengths, *tile) for tile in ((32, 16), (16, 32)) for lengths in LENGTHS]


@pytest.mark.parametrize(
    ("name", "q_len", "kv_len", "block_m", "block_n"), in_turns(MASK_SPECS, CALLS, every=13)
)
def test_masks(name: str, q_len: int, kv_len: int, block_m: int, block_n: int) -> None:
    case = Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2)
    check_kernel(_module("mask", name), MASK_SPECS[name], case, BLOCK_M=block_m, BLOCK_N=block_n)


@pytest.mark.parametrize(
    ("name", "q_len", "kv_len"),
    in_turns(SCORE_SPECS, [(33, 33), (19, 75), (75, 19), (1, 1)], every=3),
)
def test_scores(name: str, q_len: int, kv_len: int) -> None:
    case = Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2)
    check_kernel(_module("score", name), SCORE_SPECS[name], case)


@pytest.mark.parametrize("factor", [-2.0, 0.0, 3])
def test_a_factor_of_any_sign(factor: float) -> None:
    name = "times_a_float_of_any_sign"
    case = Case(40, 61, params={"factor": factor})
    check_kernel(_module("score", name), SCORE_SPECS[name], case)


@pytest.mark.parametrize("left", [0, 1, 2, 16, 40, 10**6])
@pytest.mark.parametrize("name", ["run_time_window", "sinks"])
def test_run_time_parameters(name: str, left: int) -> None:
    for q_len, kv_len in ((50, 50), (20, 61), (61, 20)):
        case = Case(q_len, kv_len, params={"left": left})
        check_kernel(_module("mask", name), MASK_SPECS[name], case)


READS = [(tma, layout) for tma in (False, True) for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "tma", "layout"), in_turns(HEAD_DIM_SPECS, READS, every=5))
def test_head_dims(name: str, tma: bool, layout: str) -> None:
    case = Case(21, 37, batch=2, q_heads=2, kv_heads=1, layout=layout)
    check_kernel(_module("dim", name), HEAD_DIM_SPECS[name], case, USE_TMA=tma)
