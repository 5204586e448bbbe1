"""Variants that nobody thought of, against float64: both Triton kernels, and those in Gluon."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.forward_hopper.space import hopper_space, why_not
from flashgen.plan.backward import backward_plan
from support.combined import combined
from support.gluon import interpreted
from support.turns import some
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward
from sweep.launch import check_kernel

#: A fast run has a sixth of them.
NUMBERS = some(range(24), every=11)
LENGTHS = (1, 16, 17, 31, 40, 64, 70)
LONG = (1, 63, 128, 130, 200, 257, 300)


@pytest.mark.parametrize("number", NUMBERS)
def test_triton(number: int) -> None:
    """With heads that are small, as they make no difference to a mask or a score."""
    variant = combined(number)
    spec = dataclasses.replace(variant.spec, head_dim=(16, 24, (16, 40))[number % 3])
    module = rendered_module(spec)
    tiles = ({"BLOCK_M": 32, "BLOCK_N": 16}, {"BLOCK_M": 16, "BLOCK_N": 32})[number % 2]
    for case in variant.cases(LENGTHS, 2):
        check_kernel(module, spec, case, **tiles)
        check_backward(module, spec, case, **tiles)


@pytest.mark.parametrize("number", NUMBERS)
def test_gluon(number: int) -> None:
    variant = combined(number)
    module = rendered_module(variant.spec, hopper=True, edit_source=interpreted)
    forward = not why_not(variant.plan)
    backward = not HopperBackward(backward_plan(variant.plan)).why_not
    assert forward == hasattr(module, "HOPPER_CONFIG")
    assert backward == hasattr(module, "BACKWARD_HOPPER")
    candidates = hopper_space(variant.plan).candidates if forward else ()
    for i, case in enumerate(variant.cases(LONG, 2)):
        if forward:
            config = candidates[(number + i) % len(candidates)]
            check_hopper(module, variant.spec, case, config)
        if backward:
            check_hopper_backward(module, variant.spec, case)
