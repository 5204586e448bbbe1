"""Runs a module's kernel on the GPU that is here, on memory full of NaN."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from support.cases import Case, inputs
from support.oracle import check


def poison() -> None:
    """Leaves NaN in the memory that the next tensors get: what is not written shows."""
    sizes = [2**27] + [2**20] * 8 + [2**14] * 64 + [2**7] * 64
    held = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
    del held


def native(spec: AttentionSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def arguments(case: Case, spec: AttentionSpec) -> dict[str, Any]:
    """The case's parameters on the GPU, whose elements lie apart where they do on the CPU."""
    there = case.arguments(spec)
    values = case.arguments(spec, "cuda")
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not there[name].is_contiguous():
            between = torch.full_like(value, torch.nan) if value.is_floating_point() else ~value
            values[name] = torch.stack([value, between], dim=-1)[..., 0]
    return values


def check_attention(module: ModuleType, spec: AttentionSpec, case: Case) -> None:
    """The public call, with the configuration that the module has for this GPU."""
    tensors = inputs(case, spec, native(spec), "cuda")
    params = arguments(case, spec)
    poison()
    out, lse = module.attention(*tensors, scale=case.scale, return_lse=True, **params)
    check(out, lse, tensors, spec, case)


def check_config(
    module: ModuleType, spec: AttentionSpec, case: Case, config: KernelConfig, *, USE_TMA: bool
) -> None:
    """One launch of the kernel with a configuration of the test's choice."""
    tensors = inputs(case, spec, native(spec), "cuda")
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    params = arguments(case, spec).values()
    poison()
    out, lse = module._launch(*tensors, scale, *params, {**config.as_dict(), "USE_TMA": USE_TMA})
    check(out, lse, tensors, spec, case)
