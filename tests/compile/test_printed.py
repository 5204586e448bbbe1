"""Printed masks and scores pass the compiler, stricter about types than the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compile.usage import check_backward_usage, check_usage
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.forward_hopper.space import hopper_space
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.symbolic.hoisting import hoist
from support.idioms import BENT_BITS
from support.tile_kernels import EXPRESSIONS, NAMES, kernel_of, scalars, tensors

TARGETS = [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
def test_every_expression_compiles_to_float32(target: GPUTarget, tmp_path: Path) -> None:
    exprs = [expr for several in EXPRESSIONS for expr in several]
    signature = {"scores_ptr": "*fp32", "out_ptr": "*fp32", "APPROX": "constexpr"}
    for name, tensor in tensors().items():
        signature[f"{name}_ptr"] = "*fp32" if tensor.dtype == torch.float32 else "*i32"
    signature["flag_ptr"] = "*i1"
    signature |= {name: _type(value) for name, value in scalars().items()}
    kernel = kernel_of(hoist(exprs, NAMES), tmp_path)
    ordered = {name: signature[name] for name in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, ordered, {"APPROX": True}), target=target)
    assert "f64" not in compiled.asm["ttir"]  # a double would cost 64 floats


def test_gluon_has_the_same_functions() -> None:
    plan = lower(BENT_BITS, "bent_bits")
    check_usage(plan, hopper_space(plan).candidates[0])
    names = HopperBackwardSplit(backward_plan(plan))
    check_backward_usage(names, split_space(names).candidates[0])


def _type(value: Any) -> str:
    return "fp32" if isinstance(value, float) else "i32"
