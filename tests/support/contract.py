"""What a module promises besides the values: derivatives and the compiler, on any device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flashgen import AttentionSpec
from support.cases import Case, inputs
from support.gradients import Tensors, exact_gradients, leaves_of, rough_gradients
from support.oracle import error_and_bound


def native_inputs(case: Case, spec: AttentionSpec, device: str = "cpu") -> Tensors:
    """q, k and v in the spec's own dtype."""
    return inputs(case, spec, getattr(torch, spec.dtype), device)


def check_gradients(
    module: ModuleType,
    spec: AttentionSpec,
    case: Case,
    *,
    lse_only: bool = False,
    device: str = "cpu",
) -> None:
    """Gradients of q, k, v and float parameters, against float64 with a bound from the data."""
    tensors = native_inputs(case, spec, device)
    given = case.arguments(spec, device)
    (q, k, v), params, learned = leaves_of(tensors, given)
    out, lse = module.attention(q, k, v, return_lse=True, scale=case.scale, **params)
    generator = torch.Generator(device).manual_seed(1)
    grad_out, grad_lse = (
        torch.randn(x.shape, generator=generator, device=device).to(x.dtype) for x in (out, lse)
    )
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    if lse_only:
        grad_out = torch.zeros_like(grad_out)
    leaves = {"q": q, "k": k, "v": v, **learned}
    got = torch.autograd.grad(
        (out, lse), tuple(leaves.values()), (grad_out, grad_lse), materialize_grads=True
    )
    for (name, leaf), mine in zip(leaves.items(), got, strict=True):
        assert mine.dtype == leaf.dtype, f"d{name}: {mine.dtype}"
    hold_gradients(got, tensors, given, spec, case.scale, grad_out, grad_lse)


def hold_gradients(
    got: Tensors,
    tensors: Tensors,
    given: dict[str, Any],
    spec: AttentionSpec,
    scale: float | None,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> None:
    """Fails unless gradients of q, k, v and learned tensors are as exact as torch's, twice over."""
    arguments = (tensors, given, spec, scale, grad_out, grad_lse)
    exact = exact_gradients(*arguments)
    rough, size = rough_gradients(*arguments)
    is_learned = (isinstance(x, torch.Tensor) and x.is_floating_point() for x in given.values())
    names = ["q", "k", "v", *(name for name, is_it in zip(given, is_learned, strict=True) if is_it)]
    for name, mine, right, low in zip(names, got, exact, rough, strict=True):
        assert mine.shape == right.shape, f"d{name}: {tuple(mine.shape)}"
        assert mine.isfinite().all(), f"d{name}: infinite or NaN"
        error, allowed = error_and_bound(mine, right, low, size)  # weights round as the LSE does
        if name not in ("q", "k", "v"):
            # Few elements, each a sum over rows whose delta is of a rounded output: the largest
            # error of torch's says little where its own happen to cancel.
            rounding = 4 * torch.finfo(tensors[0].dtype).eps
            allowed = 2 * allowed + rounding * max(1.0, right.abs().max().item())
        assert error <= allowed, f"d{name}: error {error:.3g}, allowed {allowed:.3g}"


def check_compiled(
    module: ModuleType, spec: AttentionSpec, *, backend: str, device: str = "cpu"
) -> None:
    """torch.compile(fullgraph=True) gives what eager gives, values and gradients, at any length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module.attention, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    # Up to 64 queries have one row of decided tiles, and a size of 1 is torch's constant.
    shortest = 65 if hasattr(module, "_tile_bits") else 33
    for length in (shortest, 96, 129, 200):
        case = Case(length, length, batch=2, q_heads=4, kv_heads=2)
        tensors, params = native_inputs(case, spec, device), case.arguments(spec, device)
        got, right = (f(*tensors, return_lse=True, **params) for f in (compiled, module.attention))
        torch.testing.assert_close(got, right, rtol=0, atol=0)
        counts.append(counter.frame_count)
    # A float argument may take dynamo two attempts; no length takes another.
    assert counts[0] == counts[-1] <= 2, "a length caused a recompile"

    qkv, params, learned = leaves_of(tensors, params)
    leaves = (*qkv, *learned.values())
    eager, mine = (
        torch.autograd.grad(f(*qkv, **params).float().square().sum(), leaves)
        for f in (module.attention, compiled)
    )
    torch.testing.assert_close(mine, eager)
