"""What a module promises besides the values: derivatives and the compiler, on any device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flashgen import AttentionSpec
from flashgen.reference import attention_reference
from support.cases import Case, inputs
from support.oracle import error_and_bound

Tensors = tuple[torch.Tensor, ...]


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
    (q, k, v), params, learned = _leaves(tensors, given)
    out, lse = module.attention(q, k, v, return_lse=True, scale=case.scale, **params)
    generator = torch.Generator(device).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=device) for x in (out, lse)]
    objective = _objective(out, lse, weights, lse_only)
    leaves = {"q": q, "k": k, "v": v, **learned}
    got = torch.autograd.grad(objective, tuple(leaves.values()), materialize_grads=True)
    exact, rough = (
        _gradients(tensors, given, spec, case, weights, lse_only, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    for (name, leaf), mine, right, low in zip(leaves.items(), got, exact, rough, strict=True):
        assert mine.dtype == leaf.dtype, f"d{name}: {mine.dtype}"
        assert mine.isfinite().all(), f"d{name}: infinite or NaN"
        error, allowed = error_and_bound(mine, right, low)
        assert error <= allowed, f"d{name}: error {error:.3g}, allowed {allowed:.3g}"


def _leaves(
    tensors: Tensors, given: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[Tensors, dict[str, Any], dict[str, torch.Tensor]]:
    """What a gradient is asked of: q, k, v; all parameters; those of them that have a gradient."""

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype or x.dtype).clone().requires_grad_()

    is_float = torch.is_floating_point
    learned = {
        name: leaf(x) for name, x in given.items() if isinstance(x, torch.Tensor) and is_float(x)
    }
    return tuple(map(leaf, tensors)), given | learned, learned


def _gradients(
    tensors: Tensors,
    given: dict[str, Any],
    spec: AttentionSpec,
    case: Case,
    weights: list[torch.Tensor],
    lse_only: bool,
    dtype: torch.dtype,
) -> Tensors:
    qkv, params, learned = _leaves(tensors, given, dtype)
    out, lse = attention_reference(
        *qkv,
        spec.mask,
        score=spec.score,
        normaliser=spec.normaliser,
        scale=case.scale or spec.scale,
        params=params,
        dtype=dtype,
        return_lse=True,
    )
    objective = _objective(out, lse, weights, lse_only)
    return torch.autograd.grad(objective, (*qkv, *learned.values()), materialize_grads=True)


def expected_gradients(
    tensors: Tensors,
    given: dict[str, Any],
    spec: AttentionSpec,
    scale: float,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[list[str], Tensors, Tensors]:
    """(names, exact, rough): gradients of q, k, v and learned tensors for those of out and LSE.

    The exact ones are float64's, the rough ones those of the tensors' own dtype by torch.
    """
    found = []
    for dtype in (torch.float64, tensors[0].dtype):
        qkv, params, learned = _leaves(tensors, given, dtype)
        out, lse = attention_reference(
            *qkv,
            spec.mask,
            score=spec.score,
            normaliser=spec.normaliser,
            scale=scale,
            params=params,
            dtype=dtype,
            return_lse=True,
        )
        leaves = (*qkv, *learned.values())
        of_lse = (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse.to(lse.dtype)).sum()
        objective = of_lse + (out * grad_out.to(out.dtype)).sum()
        found.append(torch.autograd.grad(objective, leaves, materialize_grads=True))
    return ["q", "k", "v", *learned], *found


def _objective(
    out: torch.Tensor, lse: torch.Tensor, weights: list[torch.Tensor], lse_only: bool
) -> torch.Tensor:
    """A number that depends on every element; rows without a key have no LSE to depend on."""
    of_lse = (lse.masked_fill(lse == -torch.inf, 0.0) * weights[1].to(lse.dtype)).sum()
    return of_lse if lse_only else of_lse + (out * weights[0].to(out.dtype)).sum()


def check_compiled(
    module: ModuleType, spec: AttentionSpec, *, backend: str, device: str = "cpu"
) -> None:
    """torch.compile(fullgraph=True) gives what eager gives, values and gradients, at any length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module.attention, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (33, 64, 129, 200):
        case = Case(length, length, batch=2, q_heads=4, kv_heads=2)
        tensors, params = native_inputs(case, spec, device), case.arguments(spec, device)
        got, right = (f(*tensors, return_lse=True, **params) for f in (compiled, module.attention))
        torch.testing.assert_close(got, right, rtol=0, atol=0)
        counts.append(counter.frame_count)
    # A float argument may take dynamo two attempts; no length takes another.
    assert counts[0] == counts[-1] <= 2, "a length caused a recompile"

    qkv, params, learned = _leaves(tensors, params)
    leaves = (*qkv, *learned.values())
    eager, mine = (
        torch.autograd.grad(f(*qkv, **params).float().square().sum(), leaves)
        for f in (module.attention, compiled)
    )
    torch.testing.assert_close(mine, eager)
