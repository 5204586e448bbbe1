"""Shared memory as it is predicted, held to what the compiler of the Triton that is here allots."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import triton

from flashgen.budget.targets import get_target
from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_triton.shared_memory import backward_usage
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from support.compiling.backward import backward_shared_bytes
from support.compiling.backward_hopper import (
    backward_hopper_shared_bytes,
    queries_shared_bytes,
)
from support.compiling.hopper import hopper_shared_bytes
from support.compiling.predicted import (
    predicted_backward_usage,
    predicted_queries_usage,
    predicted_usage,
)

#: Of tests that bound what is spilled, or follow machine code: they are of what Triton 3.6 and 3.7
#: have ptxas 12.8 make. What later ones make, docs/versions.json records.
AS_PTXAS_12_8_DOES = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) > (3, 7),
    reason="of machine code by Triton 3.6 and 3.7; docs/versions.json records that of later ones",
)


def check_usage(plan: KernelPlan, config: KernelConfig) -> None:
    """The compiler allots what is predicted for the Gluon forward kernel."""
    predicted = predicted_usage(plan, config)
    assert predicted.total == hopper_shared_bytes(plan, config), (config, predicted.breakdown)


def check_backward_usage(names: HopperBackwardSplit, config: KernelConfig) -> None:
    """The compiler allots what is predicted for each Gluon backward kernel that there is."""
    predicted = predicted_backward_usage(names, config)
    needed = backward_hopper_shared_bytes(names.backward, config)
    assert predicted.total == needed, (config, predicted.breakdown)
    if names.both_in_gluon:
        predicted = predicted_queries_usage(names)
        assert predicted.total == queries_shared_bytes(names.backward), predicted.breakdown


def hold_never_below(
    plan: KernelPlan,
    kernel: BackwardKernel,
    target: str,
    configs: Iterable[KernelConfig],
) -> None:
    """No portable backward kernel needs more than is predicted, however tiles are copied."""
    backward = backward_plan(plan)
    for config in configs:
        for tma in {plan.uses_tma(target), False}:
            predicted = backward_usage(plan, kernel, config, get_target(target), tma=tma)
            needed = backward_shared_bytes(backward, kernel, config, target, tma=tma)
            assert predicted.total >= needed, (config, tma, predicted.breakdown)
