"""Modules whose Gluon kernels run on the CPU: see support/gluon."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

import torch

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from support.bits import with_bits
from support.cases import Case, inputs
from support.contract import check_gradients
from support.gluon import interpreted
from support.oracle import Inputs, check
from support.runs import noted
from support.slip import with_slip
from support.variants import rendered_module, shipped_specs


@functools.cache
def shipped(name: str) -> ModuleType:
    """A shipped variant with all Gluon kernels that it can have, as rendered now."""
    return rendered_module(shipped_specs()[name], hopper=True, edit_source=interpreted)


def check_hopper(
    module: ModuleType,
    spec: AttentionSpec,
    case: Case,
    config: KernelConfig,
    tensors: Inputs | None = None,
) -> None:
    """Out and LSE of a call by the Gluon kernel with a configuration, beside float64.

    Of q, k and v as the case draws them, unless they are given.
    """
    tensors = tensors or inputs(case, spec, getattr(torch, spec.dtype))
    assert all(map(module._tma_reads, tensors)), f"TMA cannot read {case}"
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    params = with_bits(module, spec, *tensors[:2], case.arguments(spec))
    out, lse = module._launch_hopper(*tensors, scale, *params, config.as_dict())
    check(out, lse, tensors, spec, case, gluon=True)


def check_hopper_backward(module: ModuleType, spec: AttentionSpec, case: Case) -> None:
    """Gradients of the public call, which come from the Gluon kernels, beside float64."""
    before = noted(module).runs
    check_gradients(module, spec, case)
    assert module.runs > before, f"another kernel ran {case}"


def gradients_survive(
    edit: tuple[str, str] | None, spec: AttentionSpec, cases: Iterable[Case]
) -> bool:
    """Whether gradients of the Gluon kernels are right with a slip behind `_backward_visits`."""

    def edited(source: str) -> str:
        before, start, kernels = source.partition("def _backward_visits(")
        return interpreted(before + start + (with_slip(*edit)(kernels) if edit else kernels))

    module = rendered_module(spec, hopper=True, edit_source=edited)
    try:
        for case in cases:
            check_hopper_backward(module, spec, case)
    except AssertionError:
        return False
    return True
