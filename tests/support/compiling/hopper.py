"""What Triton's compiler and ptxas say of the Gluon kernel for Hopper, without a GPU."""

from __future__ import annotations

from flashgen.config import HOPPER, KernelConfig
from flashgen.forms.varlen import views_of
from flashgen.kernels.forward_hopper.kernel import render_hopper
from flashgen.kernels.forward_hopper.plan import OUT_COLUMNS, HopperNames
from flashgen.plan import KernelPlan
from support.compiling.compiler import FUSED
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_stages
from support.compiling.portable import DROPOUT_TYPES
from support.compiling.report import Report, report
from support.variants import names_of_gluon

KERNEL = "_attention_hopper"
IMPORTS = f"""\
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


{names_of_gluon(adds=True, clears=True)}

"""

# Triton counts the warps of the first partition: one warp group.
OPTIONS = {"num_warps": 4, **FUSED}


def hopper_shared_bytes(plan: KernelPlan, config: KernelConfig) -> int:
    """The shared memory of a block, from the compiler; stops before machine code is made."""
    return allotted_bytes(hopper_kernel(plan, config), HOPPER, OPTIONS)


def compile_hopper_varlen(plan: KernelPlan, config: KernelConfig) -> Report:
    """The same of the kernel for packed sequences."""
    names = HopperNames(plan, of_sequences=True)
    text = IMPORTS + render_hopper(plan, of_sequences=True, view_of=views_of(plan))
    types = _argument_types(plan, config, 1) | {"counter_ptr": "*i32", "list_ptr": "*i32"}
    constants = constants_of(config)
    call = call_of(plan, function_in(text, KERNEL), types, constants)
    assert not names.packs
    return report(Kernel(text, KERNEL, call, gluon=True), HOPPER, OPTIONS, by_stages)


def compile_hopper_cached(
    plan: KernelPlan, config: KernelConfig, page_size: int, packed: int, split: bool = False
) -> Report:
    """The same of the kernel for a cache, whose keys may be in parts."""
    names = HopperNames(plan, of_sequences=True, of_cache=True)
    text = IMPORTS + render_hopper(plan, of_cache=True)
    types = _argument_types(plan, config, packed, page_size)
    types |= dict.fromkeys(("counter_ptr", "list_ptr", "places_ptr"), "*i32")
    if split:
        types["out_ptr"] = "*fp32"
    constants = constants_of(config) | {"PAGE_SIZE": page_size, "SPLIT": split}
    if names.packs:
        constants["PACKED"] = packed
    call = call_of(plan, function_in(text, KERNEL), types, constants)
    return report(Kernel(text, KERNEL, call, gluon=True), HOPPER, OPTIONS, by_stages)


def compile_hopper(plan: KernelPlan, config: KernelConfig, packed: int = 1) -> Report:
    """Everything that the compiler and ptxas say, down to machine code.

    Args:
        plan: whose kernel it is.
        config: its configuration.
        packed: heads of a tile, a power of two up to 64; 1 where the kernel packs none.
    """
    return report(hopper_kernel(plan, config, packed), HOPPER, OPTIONS, by_stages)


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


def hopper_kernel(plan: KernelPlan, config: KernelConfig, packed: int = 1) -> Kernel:
    """The kernel with the types and the alignment of a call's arguments."""
    text = IMPORTS + render_hopper(plan)
    constants = constants_of(config, drops=plan.dropout)
    if HopperNames(plan).packs:
        constants["PACKED"] = packed
    types = _argument_types(plan, config, packed)
    call = call_of(plan, function_in(text, KERNEL), types, constants)
    return Kernel(text, KERNEL, call, gluon=True)


def _argument_types(
    plan: KernelPlan, config: KernelConfig, packed: int, page_size: int = 0
) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    keys = min(page_size or config.BLOCK_N, config.BLOCK_N)
    types = {"lse_ptr": "*fp32", "qk_scale": "fp32", "scale": "fp32", "tiles_ptr": "*i32"}
    types["counter_ptr"] = "*i32" if HopperNames(plan).counts else "*fp32"
    types |= {"segment_tiles_ptr": "*i32", "out_ptr": f"*{plan.triton_dtype}"} | DROPOUT_TYPES
    tensors = (
        ("q", (packed, 64 // packed), plan.qk_parts),
        ("k", (1, keys), plan.qk_parts),
        ("v", (1, keys), plan.v_parts),
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
