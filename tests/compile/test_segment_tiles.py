"""The kernel that finds where tiles of queries start, through Triton's compiler."""

from __future__ import annotations

import pytest
from triton.compiler import ASTSource

from flashgen.config import HOPPER
from support.compiling.report import report_of
from support.segments import CUT
from support.variants import rendered_module


@pytest.mark.parametrize("block_m", [128, 192])
def test_it_becomes_machine_code(block_m: int) -> None:
    kernel = rendered_module(CUT["causal"], hopper=True)._find_segment_tiles
    constants = {"BLOCK_M": block_m, "CHUNK": 256, "CYCLIC": True, "LOOKS": True}
    signature = {
        name: "constexpr" if name in constants else "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    found = report_of(source, HOPPER, {"num_warps": 8})
    assert found.shared <= 8192  # what sums pass on, and a change of layout


@pytest.mark.parametrize("looks", [0, 1, 2])
@pytest.mark.parametrize("cyclic", [False, True])
def test_so_does_the_one_that_makes_row_tables(cyclic: bool, looks: int) -> None:
    kernel = rendered_module(CUT["causal"], hopper=True)._find_rows
    constants = {"BEGINS": looks < 2, "ENDS": True, "CYCLIC": cyclic, "LOOKS": looks}
    constants |= {"CHUNK": 256, "SPAN": 8192}
    signature = {
        name: "constexpr" if name in constants else "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    assert report_of(source, HOPPER, {"num_warps": 8}).shared <= 1024
