"""What Triton's compiler and ptxas say of the Gluon kernel for Hopper, without a GPU."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.render import render_hopper
from flashgen.config import HOPPER, KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.hopper import OUT_COLUMNS, HopperNames
from support.compiling.compiler import (
    Compiled,
    allotted_bytes,
    call_of,
    compile_until,
    function_in,
    number_in,
)
from support.compiling.portable import DROPOUT_TYPES

KERNEL = "_attention_hopper"
IMPORTS = """\
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


"""

# What ptxas calls mere information about where it put waits and arrivals is not among them.
WARNING = re.compile(r"warning|Performance Loss", re.IGNORECASE)

# Triton counts the warps of the first partition: one warp group.
OPTIONS = {"num_warps": 4}


@dataclass(frozen=True)
class HopperCompiled(Compiled):
    """The figures of a Gluon kernel; `registers` are those that a thread starts with.

    Attributes:
        warnings: lines of ptxas about lost speed: C7511, C7512 or C7514 where it lets matrix
            products wait for one another.
        code: machine code, as a cubin.
    """

    warnings: tuple[str, ...]
    code: bytes = field(repr=False)


def hopper_shared_bytes(plan: KernelPlan, config: KernelConfig) -> int:
    """The shared memory of a block, from the compiler; stops before machine code is made."""
    return allotted_bytes(_source(plan, config), HOPPER, OPTIONS)


def compile_hopper(plan: KernelPlan, config: KernelConfig, packed: int = 1) -> HopperCompiled:
    """Everything that the compiler and ptxas say, down to machine code.

    Args:
        plan: whose kernel it is.
        config: its configuration.
        packed: heads of a tile, a power of two up to 64; 1 where the kernel packs none.
    """
    return figures_of(_source(plan, config, packed))


def figures_of(source: Any) -> HopperCompiled:
    """What becomes of a Gluon kernel, as Triton takes it, down to machine code."""
    from triton import knobs

    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile_until("cubin", source, HOPPER, OPTIONS)
    log = printed.getvalue()
    return HopperCompiled(
        shared=int(compiled.metadata["shared"]),
        registers=number_in(log, r"Used (\d+) registers"),
        spilled=number_in(log, r"(\d+) bytes spill stores"),
        warnings=tuple(line for line in log.splitlines() if WARNING.search(line)),
        code=compiled.module,
    )


def constants_of(config: KernelConfig, *, drops: bool = False) -> dict[str, int]:
    """What a Gluon kernel is compiled with.

    Args:
        config: its configuration.
        drops: it has dropout, which a call makes use of.
    """
    return {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "NUM_STAGES": config.num_stages,
        **({"DROPS": True} if drops else {}),
    }


def _source(plan: KernelPlan, config: KernelConfig, packed: int = 1) -> Any:
    """The kernel with the types and the alignment of a call's arguments."""
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = function_in(IMPORTS + render_hopper(plan), KERNEL)
    constants = constants_of(config, drops=plan.dropout)
    if HopperNames(plan).packs:
        constants["PACKED"] = packed
    call = call_of(plan, kernel, _argument_types(plan, config, packed), constants)
    return GluonASTSource(kernel, call.signature, call.constants, call.attributes)


def _argument_types(plan: KernelPlan, config: KernelConfig, packed: int) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    types = {"lse_ptr": "*fp32", "qk_scale": "fp32", "scale": "fp32", "tiles_ptr": "*i32"}
    types["counter_ptr"] = "*i32" if HopperNames(plan).counts else "*fp32"
    types |= {"cuts_ptr": "*i32", "out_ptr": f"*{plan.triton_dtype}"} | DROPOUT_TYPES
    tensors = (
        ("q", (packed, 64 // packed), plan.qk_parts),
        ("k", (1, config.BLOCK_N), plan.qk_parts),
        ("v", (1, config.BLOCK_N), plan.v_parts),
        ("out", (packed, 64 // packed), plan.v_parts),
    )
    for tensor, rows, parts in tensors:
        for part in parts:
            width = min(part.width, OUT_COLUMNS) if tensor == "out" else part.width
            block = [1, *rows, width]
            found = descriptor(plan.triton_dtype, plan.torch_dtype, block)
            types[f"{tensor}_desc{part.suffix}"] = found
    return types


def descriptor(triton_dtype: str, dtype: str, block: list[int]) -> str:
    """The type of a tensor descriptor of such tiles, whose elements have these names."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, dtype))
    return f"tensordesc<{triton_dtype}{block},{layout!r}>"
