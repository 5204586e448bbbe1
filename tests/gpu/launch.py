"""Runs a module's kernel on the GPU that is here, on memory full of NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec
from flashgen.config import HOPPER, KernelConfig
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper, why_not
from flashgen.plan import KernelPlan, lower
from flashgen.plan.backward import backward_plan
from flashgen.tuning.device import detect_gpu
from support.bits import with_bits
from support.cases import Case, inputs
from support.oracle import check
from support.runs import noted
from support.variants import GENERATED, rendered_module, shipped_module_anew, shipped_specs


@functools.cache
def on_hopper() -> bool:
    """Whether the GPU that is here is of Hopper."""
    gpu = detect_gpu()
    return gpu is not None and gpu.target == HOPPER


@functools.cache
def module_of(name: str, form: str) -> ModuleType:
    """A shipped module that runs one of its kernels; skips where it has none of this form.

    As shipped, it is the Gluon kernel's on Hopper; where the module does without that kernel, since
    the portable one is faster, it is rendered with it here.
    """
    spec = shipped_specs()[name]
    if form == "hopper" and spec.dtype == "float32":
        pytest.skip("there is no Gluon kernel of float32")
    module = shipped_module_anew(name)
    if form == "portable":
        module.__dict__["_runs_hopper"] = lambda q, k, v: False
        module.__dict__["_runs_hopper_backward"] = lambda q, k, v: False
        return module
    if hasattr(module, "HOPPER_CONFIG"):
        return module
    text = (GENERATED / f"{name}.py").read_text()
    assert "No Gluon kernel" in text, "built before there was one: build it again"
    config = hopper_candidates(lower(spec, name))[0]
    rendered = rendered_module(spec, name=name, hopper=True)
    rendered.HOPPER_CONFIG.update(config.as_dict())
    return rendered


@functools.cache
def backward_module_of(name: str, form: str) -> ModuleType:
    """A shipped module whose gradients come from one of its kernels; likewise.

    That of Gluon notes how often it ran in ``module.runs``.
    """
    if form == "portable":
        return module_of(name, form)
    spec = shipped_specs()[name]
    if reason := HopperBackward(backward_plan(lower(spec, name))).why_not:
        pytest.skip(f"no Gluon kernel: {reason}")
    module = shipped_module_anew(name)
    if not hasattr(module, "BACKWARD_HOPPER"):
        text = (GENERATED / f"{name}.py").read_text()
        assert "No Gluon kernel of the backward pass" in text, "build it again"
        module = rendered_module(spec, name=name, hopper=True)
    return noted(module)


@contextmanager
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN: what a kernel leaves unwritten, and another reads, shows."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*given: Any, **options: Any) -> torch.Tensor:
            x = make(*given, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        yield


def hopper_candidates(plan: KernelPlan) -> list[KernelConfig]:
    """Configurations of the Gluon kernel, most promising first; none where it cannot run."""
    if not on_hopper() or why_not(plan):
        return []
    return rank_hopper(plan, hopper_space(plan).candidates)


def poison() -> None:
    """Leaves NaN in the memory that the next tensors get: what is not written shows."""
    sizes = [2**27] + [2**20] * 8 + [2**14] * 64 + [2**7] * 64
    held = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
    del held


def native(spec: AttentionSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def check_attention(module: ModuleType, spec: AttentionSpec, case: Case) -> None:
    """The public call, with the configuration that the module has for this GPU."""
    tensors = inputs(case, spec, native(spec), "cuda")
    params = case.arguments(spec, "cuda")
    poison()
    out, lse = module.attention(*tensors, scale=case.scale, return_lse=True, **params)
    check(out, lse, tensors, spec, case)


def check_hopper(module: ModuleType, spec: AttentionSpec, case: Case, config: KernelConfig) -> None:
    """One launch of the Gluon kernel with a configuration.

    Where TMA cannot read the case's tensors, the call has to go by the portable kernel instead.
    """
    tensors = inputs(case, spec, native(spec), "cuda")
    if not all(map(module._tma_reads, tensors)):
        assert not module._runs_hopper(*tensors), f"TMA cannot read {case}"
        check_attention(module, spec, case)
        return
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    given = with_bits(module, spec, *tensors[:2], case.arguments(spec, "cuda"))
    poison()
    out, lse = module._launch_hopper(*tensors, scale, *given, config.as_dict())
    check(out, lse, tensors, spec, case)


def check_config(
    module: ModuleType, spec: AttentionSpec, case: Case, config: KernelConfig, *, USE_TMA: bool
) -> None:
    """One launch of the portable kernel with a configuration of the test's choice."""
    tensors = inputs(case, spec, native(spec), "cuda")
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    given = with_bits(module, spec, *tensors[:2], case.arguments(spec, "cuda"))
    poison()
    out, lse = module._launch(*tensors, scale, *given, {**config.as_dict(), "USE_TMA": USE_TMA})
    check(out, lse, tensors, spec, case)
