"""Gradients on the GPU: lengths, layouts, heads, tiles, the vocabulary, the same bits twice."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from gpu.launch import module_of, native, poison
from support.cases import LAYOUTS, Case, inputs
from support.contract import check_gradients
from support.variants import rendered_module, shipped_specs
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()
LENGTHS = (1, 2, 17, 63, 64, 65, 127, 129, 200, 256, 333)
UNEQUAL = ((1, 200), (200, 1), (100, 300), (300, 100), (129, 640))


def _check(module: ModuleType, name: str, case: Case) -> None:
    poison()
    check_gradients(module, SPECS[name], case, device="cuda")


@pytest.mark.parametrize("name", SPECS)
def test_lengths(name: str, form: str) -> None:
    lengths = [(n, n) for n in LENGTHS]
    lengths += [] if SPECS[name].equal_lengths else UNEQUAL
    for q_len, kv_len in lengths:
        _check(module_of(name, form), name, Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_layouts(name: str, layout: str) -> None:
    case = Case(150, 150, batch=2, q_heads=4, kv_heads=2, layout=layout)
    _check(module_of(name, "portable"), name, case)


@pytest.mark.parametrize("name", SPECS)
def test_heads(name: str) -> None:
    for batch, q_heads, kv_heads in ((1, 1, 1), (3, 5, 5), (1, 12, 1), (2, 8, 4)):
        _check(module_of(name, "portable"), name, Case(90, 90, batch, q_heads, kv_heads))


# Queries and keys of a tile, warps and stages.
TILES = ((64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 64, 4, 1), (128, 32, 4, 2))


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", ["causal_d64", "window_d128", "softcap_d128", "documents_d128"])
def test_tiles(
    name: str, tiles: tuple[int, ...], tma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    config = dict(zip(names, tiles, strict=True)) | {"USE_TMA": tma}
    module = module_of(name, "portable")
    for table in (module.BACKWARD_OF_KEYS, module.BACKWARD_OF_QUERIES):
        monkeypatch.setitem(table, module._target(torch.device("cuda", 0)), config)
    for length in (150, 256):
        _check(module, name, Case(length, length, batch=2, q_heads=4, kv_heads=2))


@functools.cache
def _rendered(name: str) -> ModuleType:
    return rendered_module(VOCABULARY[name].spec("bfloat16", 64))


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary(name: str) -> None:
    entry = VOCABULARY[name]
    for q_len, kv_len in ((150, 150), *(() if entry.equal_lengths else ((70, 210), (210, 70)))):
        case = entry.case(Case(q_len, kv_len, batch=2, q_heads=4, kv_heads=2))
        poison()
        spec = entry.spec("bfloat16", 64)
        check_gradients(_rendered(name), spec, case, device="cuda")


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_twice(name: str) -> None:
    spec = SPECS[name]
    case = Case(700, 700, batch=2, q_heads=8, kv_heads=2)
    params = case.arguments(spec, "cuda")
    results = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
        poison()
        out = module_of(name, "portable").attention(*leaves, **params)
        results.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "name", ["relative_bias", "t5_bias_causal", "additive_bias", "additive_bias_of_keys"]
)
def test_learned_tensors_have_the_same_bits_twice(name: str) -> None:
    """Sums along diagonals, by key and of pairs: nobody adds to memory that others add to."""
    entry = VOCABULARY[name]
    spec = entry.spec("bfloat16", 64)
    case = entry.case(Case(700, 700, batch=2, q_heads=8, kv_heads=2))
    params = case.arguments(spec, "cuda")
    learned = [n for n, x in params.items() if isinstance(x, torch.Tensor)]
    results = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in inputs(case, spec, native(spec), "cuda")]
        given = {n: params[n].clone().requires_grad_() for n in learned}
        poison()
        out = _rendered(name).attention(*leaves, **params | given)
        objective = out.float().square().sum()
        results.append(torch.autograd.grad(objective, (*leaves, *given.values())))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
