"""Variants that nobody thought of: the compiler takes their kernels, in the memory predicted."""

from __future__ import annotations

import pytest

from compile.usage import check_backward_usage, check_usage, hold_never_below
from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.backward_triton.space import backward_space
from flashgen.kernels.forward_hopper.space import hopper_space, why_not
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.plan.backward import backward_plan
from support.combined import combined
from support.compiling.portable import shared_bytes

NUMBERS = range(24)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize("number", NUMBERS)
def test_triton_needs_no_more_than_is_predicted(number: int) -> None:
    plan, target = combined(number).plan, TARGETS[number % len(TARGETS)]
    candidates = search_space(plan, target).candidates
    config = candidates[number % len(candidates)]
    predicted = sram_usage(plan, config, get_target(target))
    assert shared_bytes(plan, config, target) <= predicted.total, predicted.breakdown
    for kernel in BACKWARD_KERNELS:
        candidates = backward_space(plan, kernel, target).candidates
        hold_never_below(plan, kernel, target, [candidates[number % len(candidates)]])


@pytest.mark.parametrize("number", NUMBERS)
def test_gluon_needs_what_is_predicted(number: int) -> None:
    plan = combined(number).plan
    if not why_not(plan):
        candidates = hopper_space(plan).candidates
        check_usage(plan, candidates[number % len(candidates)])
    names = HopperBackwardSplit(backward_plan(plan))
    if not names.why_not:
        check_backward_usage(names, split_space(names).candidates[0])
