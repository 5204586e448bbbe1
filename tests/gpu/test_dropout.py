"""Dropout on the GPU: every kernel keeps what the oracle says, for whatever tiles and layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, causal, full
from flashgen.philox import kept
from flashgen.plan import lower
from gpu.launch import hopper_candidates, on_hopper
from support.variants import rendered_module, shipped_module

pytestmark = pytest.mark.gpu

P, SEED = 0.4, -123456789123456789
SPECS = {
    dtype: AttentionSpec(64, dtype, full(), input_precision=precision, dropout=True)
    for dtype, precision in (("bfloat16", None), ("float32", "tf32"))
}

# Queries and keys of a tile, and warps: on tensor cores by warp groups, and by single warps.
TILES = (
    (128, 64, 4),
    (128, 64, 8),
    (64, 128, 4),
    (64, 64, 4),
    (64, 64, 8),
    (32, 32, 4),
    (16, 16, 1),
)


@functools.cache
def _module(dtype: str) -> ModuleType:
    return rendered_module(SPECS[dtype])


def _configs(tiles: tuple[int, int, int], tma: bool) -> dict[str, Any]:
    block_m, block_n, num_warps = tiles
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": 2}
    return {**numbers, "USE_TMA": tma}


def _tensors(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros and, for each head, the identity."""
    zeros = torch.zeros(2, 4, 64, 64, dtype=getattr(torch, dtype), device="cuda")
    return zeros, torch.eye(64, dtype=zeros.dtype, device="cuda").repeat(2, 4, 1, 1)


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", SPECS)
def test_the_forward_kernel(dtype: str, tiles: tuple[int, int, int], tma: bool) -> None:
    """Of equal weights, with values that are a row of the identity each."""
    zeros, eye = _tensors(dtype)
    q = torch.zeros(2, 4, 200, 64, dtype=zeros.dtype, device="cuda")
    seed = torch.tensor([SEED], device="cuda")
    config = _configs(tiles, tma)
    out, _ = _module(dtype)._launch(q, zeros, eye, 1.0, P, seed, config)
    assert torch.equal(out != 0, kept((2, 4, 200, 64), P, SEED, "cuda"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_the_gluon_kernel(head_dim: int, dtype: str) -> None:
    """The same of each of its configurations, and of calls one after the other."""
    spec = AttentionSpec(head_dim, dtype, full(), dropout=True)
    configs = hopper_candidates(lower(spec, "full"))
    if not configs:
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    module = rendered_module(spec, hopper=True)
    zeros = torch.zeros(2, 4, head_dim, head_dim, dtype=getattr(torch, dtype), device="cuda")
    q = torch.zeros(2, 4, 500, head_dim, dtype=zeros.dtype, device="cuda")
    eye = torch.eye(head_dim, dtype=zeros.dtype, device="cuda").repeat(2, 4, 1, 1)
    for config in configs:
        for seed in (SEED, 0, 2**62):
            given = (P, torch.tensor([seed], device="cuda"), config.as_dict())
            out, _ = module._launch_hopper(q, zeros, eye, 1.0, *given)
            assert torch.equal(out != 0, kept((2, 4, 500, head_dim), P, seed, "cuda")), config


def _hold_to(
    keeps: torch.Tensor,
    gradients: Callable[..., Any],
    zeros: torch.Tensor,
    eye: torch.Tensor,
) -> None:
    """What a gradient shows of each pair where q, k or the output's gradient are the identity."""
    ones = torch.ones_like(zeros)
    assert torch.equal(gradients(zeros, eye, ones, ones)[0] != 0, keeps)
    assert torch.equal(gradients(eye, zeros, ones, ones)[1] != 0, keeps.mT)
    assert torch.equal(gradients(zeros, zeros, zeros, eye)[2] != 0, keeps.mT)


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", SPECS)
def test_the_backward_kernels(dtype: str, tiles: tuple[int, int, int], tma: bool) -> None:
    """With these tiles."""
    zeros, eye = _tensors(dtype)
    seed = torch.tensor([SEED], device="cuda")
    lse = torch.full(zeros.shape[:3], 64.0, device="cuda").log()
    config = _configs(tiles, tma)
    keeps = kept((2, 4, 64, 64), P, SEED, "cuda")

    def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> Any:
        arguments = (zeros, lse, grad_out, torch.zeros_like(lse), config, config)
        return _module(dtype)._backward_kernels(q, k, v, 1.0, P, seed, *arguments)

    _hold_to(keeps, gradients, zeros, eye)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gluon_kernel_of_the_backward_pass(head_dim: int, dtype: str) -> None:
    """With each kind of seed."""
    if not on_hopper():
        pytest.skip("the Gluon kernel needs a Hopper GPU")
    spec = AttentionSpec(head_dim, dtype, full(), dropout=True)
    module, length = rendered_module(spec, hopper=True), head_dim
    zeros = torch.zeros(2, 4, length, head_dim, dtype=getattr(torch, dtype), device="cuda")
    eye = torch.eye(head_dim, dtype=zeros.dtype, device="cuda").repeat(2, 4, 1, 1)
    config = module.BACKWARD_HOPPER
    lse = torch.full(zeros.shape[:3], float(length), device="cuda").log()
    for number in (SEED, 0, 2**62):
        seed = torch.tensor([number], device="cuda")
        keeps = kept((2, 4, length, length), P, number, "cuda")

        def gradients(*given: torch.Tensor, seed: torch.Tensor = seed) -> Any:
            q, k, v, grad_out = given
            saved = (zeros, lse, grad_out, torch.zeros_like(lse), config)
            return module._backward_kernels_hopper(q, k, v, 1.0, P, seed, *saved)

        _hold_to(keeps, gradients, zeros, eye)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_scores_turned_around(head_dim: int, form: str) -> None:
    """The sign of a weight says whether it was dropped: that of its score must not change it."""
    spec = AttentionSpec(head_dim, mask=causal(), score=_turned_around, dropout=True)
    module = rendered_module(spec, hopper=form == "hopper")
    shape = (2, 4, 300, head_dim)
    *leaves, grad_out = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    seed = torch.tensor([SEED], device="cuda")
    found = _gradients(module.attention, leaves, grad_out, dropout_p=P, seed=seed)
    wide = [x.double() for x in leaves]
    right = _gradients(module.reference, wide, grad_out.double(), dropout_p=P, seed=seed)
    for ours, exact in zip(found, right, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 0.01, error


def _turned_around(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return -score


def _gradients(
    attention: Callable[..., Any],
    tensors: list[torch.Tensor],
    grad_out: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(attention(*leaves, **options), leaves, grad_out)


def test_a_graph_draws_anew_in_each_replay() -> None:
    module = shipped_module("dropout_causal_d64")
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda").bfloat16() for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[torch.Tensor, ...]:
        out = module.attention(*leaves, dropout_p=0.5)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    found = []
    for _ in range(2):
        graph.replay()
        found.append([x.detach().clone() for x in results])
    assert not torch.equal(found[0][0], found[1][0])
    for out, *gradients in found:
        assert all(bool(x.isfinite().all()) for x in (out, *gradients))
        # The output is linear in v: its gradient by v gives the output back.
        again = (gradients[2].float() * v.float()).sum()
        torch.testing.assert_close(again, 2 * out.float().square().sum(), rtol=0.02, atol=0.0)


def test_the_compiler() -> None:
    """By its default backend, which draws seeds in a way of its own."""
    module = shipped_module("dropout_causal_d64")
    compiled = torch.compile(module.attention, fullgraph=True)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda").bfloat16() for _ in range(3))
    one, other = (compiled(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(one, other)
    seed = torch.tensor([3], device="cuda")
    right = module.attention(q, k, v, dropout_p=0.5, seed=seed)
    assert torch.equal(compiled(q, k, v, dropout_p=0.5, seed=seed), right)
