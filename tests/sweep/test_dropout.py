"""Dropout in the interpreter: the same weights are dropped whatever the tiles, in every kernel."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.kernel import ForwardTriton
from flashgen.philox import kept, kept_scale
from flashgen.plan import lower
from flashgen.tuning import forward_bench
from support.cases import Case, inputs
from support.contract import check_gradients
from support.turns import in_turns
from support.variants import rendered_module, shipped_module, shipped_specs
from sweep.backward import check_backward
from sweep.dropout import SPECS, case_of
from sweep.launch import check_kernel

P, SEED = 0.4, -123456789123456789
BLOCKS = [(16, 16), (16, 64), (32, 16), (64, 32), (64, 64)]


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name])


def _config(block_m: int, block_n: int) -> dict[str, Any]:
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 2}
    return {**numbers, "USE_TMA": block_m == block_n}


@pytest.mark.parametrize(("block_m", "block_n"), BLOCKS)
def test_the_forward_kernel_keeps_the_same_whatever_its_tiles(block_m: int, block_n: int) -> None:
    """Of equal weights, with values that are a row of the identity each."""
    q_len, kv_len = 75, 64
    q, k = torch.zeros(2, 4, q_len, 64), torch.zeros(2, 2, kv_len, 64)
    v = torch.eye(64).expand(2, 2, 64, 64).contiguous()
    config, seed = _config(block_m, block_n), torch.tensor([SEED])
    out, lse = _module("full")._launch(q, k, v, 1.0, P, seed, config)
    keeps = kept((2, 4, q_len, kv_len), P, SEED)
    torch.testing.assert_close(out, keeps * (kept_scale(P) / kv_len))
    assert torch.equal(out != 0.0, keeps)
    torch.testing.assert_close(lse, torch.full_like(lse, kv_len).log())  # of all weights


SHAPES = [
    pytest.param(*block, marks=() if i % 2 else pytest.mark.full) for i, block in enumerate(BLOCKS)
]


@pytest.mark.parametrize(("block_m", "block_n"), SHAPES)
def test_the_backward_kernels_keep_the_same(block_m: int, block_n: int) -> None:
    """What a gradient shows of each pair where q, k or the output's gradient are the identity."""
    length = 64
    config, seed = _config(block_m, block_n), torch.tensor([SEED])
    zeros, eye = torch.zeros(2, 4, length, 64), torch.eye(64).expand(2, 4, 64, 64).contiguous()
    zeros_kv, eye_kv = zeros[:, :2].contiguous(), eye[:, :2].contiguous()
    ones = torch.ones_like(zeros_kv)
    lse = torch.full((2, 4, length), float(length)).log()
    keeps = kept((2, 4, length, length), P, SEED)

    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> Any:
        saved = torch.zeros_like(grad_out), lse  # an output that takes nothing off
        arguments = (*saved, grad_out, torch.zeros_like(lse), config, config)
        return _module("full")._backward_kernels(q, k, v, 1.0, P, seed, *arguments)

    grad_q, _, _ = gradients(zeros, eye_kv, ones, torch.ones_like(zeros))
    assert torch.equal(grad_q != 0.0, keeps)
    # Keys and values add the heads of a group up: each counts how many of them keep it.
    _, grad_k, _ = gradients(eye, zeros_kv, ones, torch.ones_like(zeros))
    _, _, grad_v = gradients(zeros, zeros_kv, zeros_kv, eye)
    counts = keeps.unflatten(1, (2, 2)).sum(2).mT
    weight = kept_scale(P) / length
    for grad, one in ((grad_k, 64 * weight), (grad_v, weight)):
        assert torch.equal((grad / one).round().long(), counts)


@pytest.mark.parametrize(
    ("name", "block_m", "block_n"), in_turns(SPECS, [(32, 16), (16, 64)], every=2)
)
def test_values_and_gradients(name: str, block_m: int, block_n: int) -> None:
    """With every kind of what else a kernel does: against float64 with the oracle's mask."""
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    case = case_of(name, 45, 45, 2, 2, 1)
    check_kernel(_module(name), SPECS[name], case, **blocks)
    check_backward(_module(name), SPECS[name], case, **blocks)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-9, 0.1, 0.5, 0.9])
def test_probabilities(dropout_p: float) -> None:
    case = Case(37, 52, 1, 2, 1, params={"dropout_p": dropout_p})
    module, spec = shipped_module("dropout_causal_d64"), shipped_specs()["dropout_causal_d64"]
    check_kernel(module, spec, case)
    check_backward(module, spec, case)


@pytest.mark.parametrize("name", ["segments", "softcap", "sinks", "sigmoid"])
def test_without_dropout_the_kernels_are_those_of_a_module_without_it(name: str) -> None:
    """dropout_p=0: the same bits, forward and backward."""
    spec = SPECS[name]
    plain = rendered_module(replace(spec, dropout=False))
    case = Case(45, 45, 2, 4, 2)
    found = []
    for module, given in ((_module(name), {"dropout_p": 0.0}), (plain, {})):
        tensors = inputs(case, spec, getattr(torch, spec.dtype))
        leaves = [x.clone().requires_grad_() for x in tensors]
        others = {"sinks": torch.tensor([0.5, 1.0, -1.0, 0.0])} if name == "sinks" else {}
        out, lse = module.attention(*leaves, return_lse=True, **others, **given)
        grads = torch.autograd.grad((out.float().square().sum(), lse.sum()), leaves)
        found.append((out, lse, *grads))
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("name", ["segments", "sinks", "sigmoid"])
def test_through_the_public_call(name: str) -> None:
    """By autograd: the operators hand the seed on, and kernels compute both ways."""
    check_gradients(_module(name), SPECS[name], Case(40, 40, batch=2, q_heads=4, kv_heads=2))


def test_forward_and_backward_agree_on_a_seed_that_was_drawn() -> None:
    """The output is linear in v: its gradient by v gives the output back.

    Two ways to add the same products up, whose sum may be small: both round at the products' size.
    """
    module, shape, generator = _module("full"), (1, 2, 40, 64), torch.Generator().manual_seed(6)
    q, k, v, weights = torch.randn(4, *shape, generator=generator)
    v.requires_grad_()
    torch.manual_seed(7)  # of the generator that draws the dropout's seeds
    for _ in range(3):
        out = module.attention(q, k, v, dropout_p=0.5)
        (grad_v,) = torch.autograd.grad(out, v, weights)
        products = (grad_v * v).detach()
        error = (products.sum() - (out * weights).sum()).abs()
        assert error <= 1e-5 * products.abs().sum()


def test_candidates_are_measured_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a candidate that drops others than it should is rejected."""
    config = KernelConfig(32, 32, 4, 2)
    monkeypatch.setattr(forward_bench, "usual_lengths", lambda plan: (40,))
    qkv = torch.randn(3, 1, 2, 40, 64).half()
    monkeypatch.setattr(forward_bench, "random_inputs", lambda *_: qkv)
    spec = replace(SPECS["full"], dtype="float16")
    bench = forward_bench.ForwardBench(lower(spec, "measured"), "sm_90", [config], ForwardTriton())
    assert bench.params[40]["dropout_p"] > 0
    bench.check(config)
    before = bench.module._dropped
    monkeypatch.setattr(bench.module, "_dropped", lambda x, p, *of: before(x, 0.9 * p, *of))
    with pytest.raises(ArithmeticError, match="wrong result"):
        bench.check(config)
