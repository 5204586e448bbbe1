"""The kernel that finds where tiles of queries start, through Triton's compiler."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from support.segments import CUT
from support.variants import rendered_module


@pytest.mark.parametrize("block_m", [128, 192])
def test_it_becomes_machine_code(block_m: int) -> None:
    kernel = rendered_module(CUT["causal"], hopper=True)._cut_queries
    constants = {"BLOCK_M": block_m, "CHUNK": 256}
    signature = {
        name: "constexpr" if name in constants else "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.metadata.shared <= 1024  # what the running sum passes on
