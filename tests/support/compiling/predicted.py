"""Shared memory of Gluon kernels as it is predicted for the compiler that is here."""

from __future__ import annotations

import triton

from flashgen.budget.hopper import hopper_usage
from flashgen.budget.hopper_backward import hopper_backward_usage, queries_usage
from flashgen.budget.sram import SramUsage
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.hopper_backward import HopperBackward

# Triton 3.6 has partitions capture strides of 1 too.
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def predicted_usage(plan: KernelPlan, config: KernelConfig) -> SramUsage:
    """Of the forward kernel."""
    return hopper_usage(plan, config, ones=OLDER)


def predicted_backward_usage(names: HopperBackward, config: KernelConfig) -> SramUsage:
    """Of the backward kernel, or of the one over tiles of keys."""
    return hopper_backward_usage(names, config, ones=OLDER)


def predicted_queries_usage(names: HopperBackward) -> SramUsage:
    """Of the backward kernel over tiles of queries."""
    return queries_usage(names, ones=OLDER)
