"""CPU tensors outside the interpreter: eager torch by tiles of queries, with the derived bounds."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, causal
from support.cases import Case
from support.contract import native_inputs
from support.gradients import leaves_of
from support.variants import ROOT, rendered_module
from support.vocabulary import VOCABULARY

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")
#: Three tiles of queries of each head, the last one of a row.
CASE = Case(33, 33, batch=2, q_heads=4, kv_heads=2)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> object:
    """Has modules take 16 queries at a time."""

    def of(module: ModuleType) -> ModuleType:
        monkeypatch.setattr(module, "EAGER_TILE", 1)
        return module

    return of


def both(module: ModuleType, spec: AttentionSpec, case: Case) -> list[list[torch.Tensor]]:
    """Results and gradients of a call, by tiles and by the reference."""
    found = []
    for attention in (module.attention, module.reference):
        given = case.arguments(spec)
        qkv, params, learned = leaves_of(native_inputs(case, spec), given)
        results = attention(*qkv, return_lse=True, scale=case.scale, **params)
        drawn = torch.Generator().manual_seed(1)
        outer = [torch.randn(x.shape, generator=drawn).to(x.dtype) for x in results]
        outer[1].masked_fill_(results[1].isinf(), 0.0)
        leaves = (*qkv, *learned.values())
        grads = torch.autograd.grad(results, leaves, outer, materialize_grads=True)
        found.append([*(x.detach() for x in results), *grads])
    return found


@pytest.mark.parametrize("name", VOCABULARY)
def test_tiles_compute_what_the_reference_does(name: str, small_tiles) -> None:
    entry = VOCABULARY[name]
    spec = entry.spec("float32")
    lengths = [(33, 33)] if entry.equal_lengths else [(33, 40), (33, 17)]
    for q_len, kv_len in lengths:
        case = entry.case(Case(q_len, kv_len, 2, 4, 2, scale=0.7))
        for tiles, whole in zip(*both(small_tiles(rendered_module(spec)), spec, case), strict=True):
            torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


def test_tiles_drop_the_same_weights(small_tiles) -> None:
    spec = AttentionSpec(16, "float32", causal(), dropout=True)
    case = Case(33, 33, 2, 4, 2, params={"dropout_p": 0.4})
    for tiles, whole in zip(*both(small_tiles(rendered_module(spec)), spec, case), strict=True):
        torch.testing.assert_close(tiles, whole, rtol=2e-5, atol=2e-5)


def test_keys_behind_the_bounds_are_not_read(small_tiles) -> None:
    spec = AttentionSpec(16, "float32", causal(align="top_left"))
    module = small_tiles(rendered_module(spec))
    q, k, v = native_inputs(Case(33, 99), spec)
    right = module.attention(q, k, v)
    k[:, :, 33:], v[:, :, 33:] = torch.nan, torch.nan
    assert torch.equal(module.attention(q, k, v), right)


def test_memory_is_that_of_a_tile(tmp_path) -> None:
    """16,384 tokens in under 1 GB: the scores of one head alone are one."""
    program = f"""
import resource, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
warnings.simplefilter("ignore")
import torch
from generated import window_d128
q = torch.randn(1, 1, 16384, 128, dtype=torch.bfloat16)
window_d128.attention(q[:, :, :64], q[:, :, :64], q[:, :, :64], left=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
window_d128.attention(q, q, q, left=64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2**18  # in kB: 256 MB
