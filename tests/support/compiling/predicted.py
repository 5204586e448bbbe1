"""Shared memory of Gluon kernels as it is predicted for the compiler that is here."""

from __future__ import annotations

import triton

from flashgen.budget.usage import SramUsage
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.shared_memory import hopper_backward_usage
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.shared_memory import queries_usage
from flashgen.kernels.forward_hopper.shared_memory import hopper_usage
from flashgen.plan import KernelPlan

# Triton 3.6 has partitions capture strides of 1 too.
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def predicted_usage(plan: KernelPlan, config: KernelConfig) -> SramUsage:
    """Of the forward kernel."""
    return hopper_usage(plan, config, ones=OLDER)


def predicted_backward_usage(names: HopperBackwardSplit, config: KernelConfig) -> SramUsage:
    """Of the backward kernel, or of the one over tiles of keys."""
    return hopper_backward_usage(names, config, ones=OLDER)


def predicted_queries_usage(names: HopperBackwardSplit) -> SramUsage:
    """Of the backward kernel over tiles of queries."""
    return queries_usage(names, ones=OLDER)
