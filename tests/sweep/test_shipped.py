"""Every shipped variant against float64, in every way that a call can differ from another."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from flashgen import Int
from support.cases import LAYOUTS, Case, around_tiles, every_remainder, inputs
from support.oracle import check
from support.variants import shipped_module, shipped_specs
from sweep.launch import check_kernel, sweep_dtype

SPECS = shipped_specs()
MODULES: dict[str, ModuleType] = {name: shipped_module(name) for name in SPECS}

# The kernel once in each shape of tile, with descriptors for every other length in turn.
TILES = ((32, 16), (16, 32))


def _shipped_tiles(name: str) -> set[tuple[int, int, bool]]:
    """The different tiles that the module's configurations name."""
    configs = MODULES[name].CONFIGS.values()
    return {(config["BLOCK_M"], config["BLOCK_N"], config["USE_TMA"]) for config in configs}


def _remainders():
    for name, spec in SPECS.items():
        for turn, (m, n) in enumerate(TILES):
            cases = every_remainder(m, n, equal_lengths=spec.equal_lengths)
            for i, case in enumerate(cases):
                tma = (i + turn) % 2 == 0
                label = f"{name}-{m}x{n}-{case}{'-tma' * tma}"
                yield pytest.param(name, case, m, n, tma, id=label)


def _own_tiles():
    for name, spec in SPECS.items():
        for m, n, tma in sorted(_shipped_tiles(name)):
            for case in around_tiles(m, n, equal_lengths=spec.equal_lengths):
                label = f"{name}-{m}x{n}-{case}{'-tma' * tma}"
                yield pytest.param(name, case, m, n, tma, id=label)


@pytest.mark.parametrize(("name", "case", "block_m", "block_n", "tma"), [*_remainders()])
def test_every_remainder(name: str, case: Case, block_m: int, block_n: int, tma: bool) -> None:
    check_kernel(MODULES[name], SPECS[name], case, BLOCK_M=block_m, BLOCK_N=block_n, USE_TMA=tma)


@pytest.mark.parametrize(("name", "case", "block_m", "block_n", "tma"), [*_own_tiles()])
def test_shipped_tiles(name: str, case: Case, block_m: int, block_n: int, tma: bool) -> None:
    check_kernel(MODULES[name], SPECS[name], case, BLOCK_M=block_m, BLOCK_N=block_n, USE_TMA=tma)


HEADS = [
    Case(37, 37, batch=batch, q_heads=q_heads, kv_heads=kv_heads)
    for batch, q_heads, kv_heads in ((1, 2, 2), (2, 4, 2), (2, 4, 1), (1, 6, 2), (3, 1, 1))
]


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_heads(name: str, case: Case, tma: bool) -> None:
    check_kernel(MODULES[name], SPECS[name], case, USE_TMA=tma)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_layouts(name: str, layout: str, tma: bool) -> None:
    case = Case(35, 35, batch=2, q_heads=4, kv_heads=2, layout=layout)
    check_kernel(MODULES[name], SPECS[name], case, USE_TMA=tma)


EMPTY = [
    Case(5, 5, batch=0),
    Case(0, 0),
    Case(0, 9, batch=2),
    Case(7, 0, q_heads=2, kv_heads=2),
]


@pytest.mark.parametrize("case", EMPTY, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_nothing_to_do(name: str, case: Case) -> None:
    if SPECS[name].equal_lengths and case.q_len != case.kv_len:
        tensors = inputs(case, SPECS[name], getattr(torch, SPECS[name].dtype))
        with pytest.raises(ValueError, match=rf"^k: got kv_len {case.kv_len} for q_len "):
            MODULES[name].attention(*tensors, **case.arguments(SPECS[name]))
    else:
        check_kernel(MODULES[name], SPECS[name], case)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 2.0])
@pytest.mark.parametrize("name", SPECS)
def test_scale(name: str, scale: float) -> None:
    check_kernel(MODULES[name], SPECS[name], Case(33, 33, scale=scale))


PARAMS = [
    (name, param.name, value)
    for name, spec in SPECS.items()
    for param in spec.params
    if isinstance(param, Int)
    for value in (param.min, param.min + 1, 5, 16, 10**6)
]
LENGTHS = [(40, 40), (17, 61), (61, 17), (1, 50)]


@pytest.mark.parametrize(("q_len", "kv_len"), LENGTHS, ids=lambda length: f"{length}")
@pytest.mark.parametrize(("name", "param", "value"), PARAMS)
def test_params(name: str, param: str, value: int, q_len: int, kv_len: int) -> None:
    if SPECS[name].equal_lengths:
        kv_len = q_len
    check_kernel(MODULES[name], SPECS[name], Case(q_len, kv_len, params={param: value}))


@pytest.mark.parametrize("name", SPECS)
def test_attention_runs_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call, with the variant's own dtype and configuration."""
    module, spec = MODULES[name], SPECS[name]
    monkeypatch.delattr(module, "reference")  # what it would run instead
    case = Case(70, 70, batch=2, q_heads=4, kv_heads=2)
    tensors = inputs(case, spec, getattr(torch, spec.dtype))
    params = case.arguments(spec)
    out, lse = module.attention(*tensors, return_lse=True, **params)
    check(out, lse, tensors, spec, case)
    assert torch.equal(module.attention(*tensors, **params), out)


@pytest.mark.parametrize("name", SPECS)
def test_descriptors_are_used_where_they_can_be(name: str) -> None:
    """test_layouts takes both paths: TMA reads these layouts and no others."""
    case = dict(q_len=9, kv_len=9, batch=2, q_heads=2, kv_heads=2)
    read = {
        layout: MODULES[name]._tma_reads(
            inputs(Case(**case, layout=layout), SPECS[name], sweep_dtype(SPECS[name]))[0]
        )
        for layout in LAYOUTS
    }
    no = {"unaligned", "one_head", "one_row"}
    assert read == {layout: layout not in no for layout in LAYOUTS}


def test_the_sweep_covers_every_remainder() -> None:
    for (m, n), equal in itertools.product(TILES, (True, False)):
        cases = list(every_remainder(m, n, equal_lengths=equal))
        pairs = [cases] if equal else [[c for c in cases if c.q_len != c.kv_len], cases]
        for some in pairs:
            assert {case.q_len % m for case in some} == set(range(m))
            assert {case.kv_len % n for case in some} == set(range(n))
        if not equal:
            full = [c for c in cases if c.q_len >= m and c.kv_len >= n]
            assert {(c.kv_len - c.q_len) % n for c in full if c.kv_len > c.q_len} == set(range(n))
            assert {(c.kv_len - c.q_len) % n for c in full if c.kv_len < c.q_len} == set(range(n))
