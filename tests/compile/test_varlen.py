"""The Gluon kernels for packed sequences: shared memory, and machine code beside the dense ones."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec, causal
from flashgen.config import HOPPER
from flashgen.forms.varlen import MORE_SHARED
from flashgen.kernels.backward_hopper.kernel import BackwardHopper
from flashgen.plan.backward import backward_plan
from support.compiling.backward_hopper import (
    compile_backward_hopper,
    compile_backward_hopper_varlen,
)
from support.compiling.hopper import compile_hopper, compile_hopper_varlen
from support.compiling.report import Report
from support.variants import first_on_hopper, lowered

#: By head dimension: bytes of a thread's numbers in memory beyond the dense kernel's. At d=64 three
#: consumers have no register to spare for the lengths of a sequence.
SPILLED = {128: 0, 64: 128}
SPECS = {head_dim: AttentionSpec(head_dim, mask=causal()) for head_dim in SPILLED}


@pytest.mark.parametrize("head_dim", SPILLED)
def test_forward(head_dim: int) -> None:
    plan, config = lowered(SPECS[head_dim]), first_on_hopper(SPECS[head_dim])
    dense, varlen = compile_hopper(plan, config), compile_hopper_varlen(plan, config)
    _hold(dense, varlen, SPILLED[head_dim])


def test_backward() -> None:
    plan = lowered(SPECS[128])
    [config, *_] = BackwardHopper().space(plan, HOPPER).candidates
    backward = backward_plan(plan)
    dense = compile_backward_hopper(backward, config)
    _hold(dense, compile_backward_hopper_varlen(backward, config), spilled=32)


def _hold(dense: Report, varlen: Report, spilled: int) -> None:
    assert 0 < varlen.shared - dense.shared <= MORE_SHARED
    assert varlen.spilled <= dense.spilled + spilled
    assert not varlen.warnings
