"""Kernels on the GPU against float64, at sizes that the interpreter has no time for."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan import lower
from flashgen.tuning.device import detect_gpu
from gpu.launch import check_attention, check_config, check_hopper, hopper_candidates, module_of
from support.cases import LAYOUTS, Case
from support.variants import rendered_module, shipped_specs
from support.variety import HEAD_DIM_SPECS, MASK_SPECS, SCORE_SPECS

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()

LENGTHS = [(1, 1), (64, 64), (129, 129), (2048, 2048), (1023, 1023)]
UNEQUAL = [(1, 4099), (777, 2000), (2000, 777), (128, 1024), (0, 5), (5, 0)]


def _defined(spec: AttentionSpec, lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(q, kv) for q, kv in lengths if q == kv or not spec.equal_lengths]


@pytest.mark.parametrize("name", SPECS)
def test_lengths(name: str, form: str) -> None:
    for q_len, kv_len in _defined(SPECS[name], LENGTHS + UNEQUAL):
        case = Case(q_len, kv_len, batch=2, q_heads=8, kv_heads=2)
        check_attention(module_of(name, form), SPECS[name], case)


@pytest.mark.parametrize("layout", ["contiguous", "unaligned"])
@pytest.mark.parametrize("name", SPECS)
def test_every_remainder_of_the_shipped_tiles(name: str, layout: str, form: str) -> None:
    module, spec = module_of(name, form), SPECS[name]
    config = module._config(torch.device("cuda", 0))
    if form == "hopper":
        config = module.HOPPER_CONFIG
        assert module._is_hopper(torch.device("cuda", 0))
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    lengths = [(m + n + r, m + n + r) for r in range(max(m, n))]
    lengths += [(m + r, m + 2 * n + 7 * r % n) for r in range(0, max(m, n), 3)]
    lengths += [(2 * m + r, n + 7 * r % n) for r in range(0, max(m, n), 3)]
    for q_len, kv_len in _defined(spec, lengths):
        check_attention(module, spec, Case(q_len, kv_len, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_layouts(name: str, layout: str, form: str) -> None:
    case = Case(517, 517, batch=2, q_heads=8, kv_heads=4, layout=layout)
    check_attention(module_of(name, form), SPECS[name], case)


@pytest.mark.parametrize("name", SPECS)
def test_every_candidate(name: str, form: str) -> None:
    """Whatever tuning may choose is right."""
    spec, gpu = SPECS[name], detect_gpu()
    assert gpu is not None
    plan = lower(spec, name)
    module, tma = module_of(name, form), plan.uses_tma(gpu.target)
    case = Case(385, 385, batch=1, q_heads=4, kv_heads=2)
    if form == "hopper":
        for config in hopper_candidates(plan):
            check_hopper(module, spec, case, config)
    else:
        for config in search_space(plan, gpu.target).candidates:
            check_config(module, spec, case, config, USE_TMA=tma)


@pytest.mark.parametrize("left", [0, 1, 17, 128, 1000, 2**30])
def test_windows(left: int, form: str) -> None:
    for q_len, kv_len in ((1500, 1500), (300, 1500), (1500, 300)):
        case = Case(q_len, kv_len, q_heads=2, kv_heads=2, params={"left": left})
        check_attention(module_of("window_d128", form), SPECS["window_d128"], case)


@functools.cache
def _rendered(kind: str, name: str) -> ModuleType:
    specs = {"mask": MASK_SPECS, "score": SCORE_SPECS, "dim": HEAD_DIM_SPECS}
    return rendered_module(specs[kind][name], hopper=True)


def _check_hopper(kind: str, name: str, spec: AttentionSpec, cases: list[Case]) -> None:
    """The Gluon kernel with the model's first configuration, and with its smallest tiles."""
    found = hopper_candidates(lower(spec, name))
    for config in {*found[:1], *sorted(found)[:1]}:
        for case in cases:
            check_hopper(_rendered(kind, name), spec, case, config)


RAGGED = ((1, 1), (64, 64), (203, 203), (77, 300), (300, 77))


@pytest.mark.parametrize("name", MASK_SPECS)
def test_masks(name: str) -> None:
    spec = MASK_SPECS[name]
    config = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    cases = [Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2) for q_len, kv_len in RAGGED]
    for tma in (False, True):
        for case in cases:
            check_config(_rendered("mask", name), spec, case, config, USE_TMA=tma)
    _check_hopper("mask", name, spec, cases)


@pytest.mark.parametrize("name", SCORE_SPECS)
def test_scores(name: str) -> None:
    spec = SCORE_SPECS[name]
    config = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    cases = [Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2) for q_len, kv_len in RAGGED]
    for case in cases:
        check_config(_rendered("score", name), spec, case, config, USE_TMA=True)
    _check_hopper("score", name, spec, cases)


@pytest.mark.parametrize("name", HEAD_DIM_SPECS)
def test_head_dims(name: str) -> None:
    spec = HEAD_DIM_SPECS[name]
    for block_n in (32, 64) if spec.qk_head_dim <= 256 else (32,):
        config = KernelConfig(BLOCK_M=64, BLOCK_N=block_n, num_warps=4, num_stages=2)
        for layout in LAYOUTS:
            case = Case(150, 203, batch=2, q_heads=2, kv_heads=1, layout=layout)
            check_config(_rendered("dim", name), spec, case, config, USE_TMA=True)
    cases = [Case(q_len, kv_len, batch=3, q_heads=6, kv_heads=2) for q_len, kv_len in RAGGED]
    _check_hopper("dim", name, spec, cases)
