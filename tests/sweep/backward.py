"""Runs a module's backward kernels in the interpreter and holds them to float64."""

from __future__ import annotations

from types import ModuleType

import torch

from flashgen import AttentionSpec
from flashgen.plan.backward import backward_plan
from support.bits import with_bits
from support.cases import Case, inputs
from support.contract import hold_gradients
from support.variants import lowered
from sweep.launch import sweep_dtype


def check_backward(
    module: ModuleType,
    spec: AttentionSpec,
    case: Case,
    *,
    BLOCK_M: int = 32,
    BLOCK_N: int = 16,
    USE_TMA: bool = False,
    lse_only: bool = False,
) -> None:
    """Gradients of out and the LSE by both kernels with these tile sizes, on the case's data.

    What the forward pass saved is float64's, rounded: its own error is not the backward's.
    """
    config = {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "num_warps": 4,
        "num_stages": 2,
        "USE_TMA": USE_TMA,
    }
    dtype = sweep_dtype(spec)
    tensors = inputs(case, spec, dtype)
    params = case.arguments(spec)
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    doubles = (x.double() for x in tensors)
    out, lse = module.reference(*doubles, scale=scale, return_lse=True, **params)
    generator = torch.Generator().manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    if lse_only:
        grad_out.zero_()
    grad_out = grad_out.to(dtype)
    if case.layout != "contiguous":  # as a projection gives it
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    got = module._backward_kernels(
        *tensors,
        scale,
        *with_bits(module, spec, *tensors[:2], params),
        out.to(dtype),
        lse.float(),
        grad_out,
        grad_lse,
        config,
        config,
    )
    if hasattr(module, "_with_sink"):
        sinks = (params[name] for name in backward_plan(lowered(spec, "swept")).sink_tensors)
        got = module._with_sink(got, lse.float(), *sinks)
    hold_gradients(got, tensors, params, spec, scale, grad_out, grad_lse)
