"""Variants that nobody thought of: the compiler takes their kernels, in the memory predicted."""

from __future__ import annotations

import pytest
import triton

from flashgen.budget.backward_sram import backward_usage
from flashgen.budget.hopper import hopper_usage
from flashgen.budget.hopper_backward import hopper_backward_usage, queries_usage
from flashgen.budget.sram import sram_usage
from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS
from flashgen.plan.backward import backward_plan
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.tuning.backward_space import backward_space
from flashgen.tuning.compiled import shared_bytes
from flashgen.tuning.compiled_backward import backward_shared_bytes
from flashgen.tuning.compiled_backward_hopper import (
    backward_hopper_shared_bytes,
    queries_shared_bytes,
)
from flashgen.tuning.compiled_hopper import hopper_shared_bytes
from flashgen.tuning.hopper_backward_space import hopper_backward_space
from flashgen.tuning.hopper_space import hopper_space, why_not
from flashgen.tuning.space import search_space
from support.combined import combined

NUMBERS = range(24)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


@pytest.mark.parametrize("number", NUMBERS)
def test_triton_needs_no_more_than_is_predicted(number: int) -> None:
    plan, target = combined(number).plan, TARGETS[number % len(TARGETS)]
    candidates = search_space(plan, target).candidates
    config = candidates[number % len(candidates)]
    predicted = sram_usage(plan, config, get_target(target))
    assert shared_bytes(plan, config, target) <= predicted.total, predicted.breakdown
    for kernel in BACKWARD_KERNELS:
        candidates = backward_space(plan, kernel, target).candidates
        config = candidates[number % len(candidates)]
        predicted = backward_usage(plan, kernel, config, get_target(target))
        needed = backward_shared_bytes(backward_plan(plan), kernel, config, target, tma=None)
        assert needed <= predicted.total, (kernel, config, predicted.breakdown)


@pytest.mark.parametrize("number", NUMBERS)
def test_gluon_needs_what_is_predicted(number: int) -> None:
    plan = combined(number).plan
    if not why_not(plan):
        candidates = hopper_space(plan).candidates
        config = candidates[number % len(candidates)]
        predicted = hopper_usage(plan, config, ones=OLDER)
        assert hopper_shared_bytes(plan, config) == predicted.total, predicted.breakdown
    names = HopperBackward(backward_plan(plan))
    if names.why_not:
        return
    config = hopper_backward_space(names).candidates[0]
    predicted = hopper_backward_usage(names, config, ones=OLDER)
    needed = backward_hopper_shared_bytes(names.backward, config)
    assert needed == predicted.total, predicted.breakdown
    if names.both_in_gluon:
        predicted = queries_usage(names, ones=OLDER)
        assert queries_shared_bytes(names.backward) == predicted.total, predicted.breakdown
