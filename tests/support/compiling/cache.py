"""What Triton's compiler says of the cache kernel, for any target and without a GPU."""

from __future__ import annotations

from dataclasses import replace

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.cache_triton.kernel import render_cache
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.plan import KernelPlan
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_triton
from support.compiling.portable import IMPORTS, options_of
from support.compiling.report import Report, report

KERNEL, DECIDING = "_cache_attention", "_decide_cache_tiles"


def cache_bytes(plan: KernelPlan, config: KernelConfig, target: str, page_size: int = 0) -> int:
    """The shared memory of a block, from the compiler; stops before machine code is made."""
    return allotted_bytes(cache_kernel(plan, config, target, page_size), target, options_of(config))


def compile_cache(
    plan: KernelPlan, config: KernelConfig, target: str, page_size: int = 0
) -> Report:
    """Everything the compiler says, down to machine code."""
    kernel = cache_kernel(plan, config, target, page_size)
    return report(kernel, target, options_of(config), by_triton)


def cache_kernel(plan: KernelPlan, config: KernelConfig, target: str, page_size: int) -> Kernel:
    """The kernel with the types and the alignment of a call's arguments."""
    text = IMPORTS + render_cache(plan)
    dtype = f"*{plan.triton_dtype}"
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), dtype)
    types |= dict.fromkeys(("lse_ptr", "parts_ptr"), "*fp32")
    integers = ("counters_ptr", "kv_lens_ptr", "cu_seqlens_ptr", "places_ptr", "decided_ptr")
    types |= dict.fromkeys(integers, "*i32") | {"qk_scale": "fp32", "scale": "fp32"}
    cache = CachePlan(plan)
    rows = config.BLOCK_M
    constants = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "ROWS": rows,
        "PARTS": max(1, min(16, 8192 // (rows << (plan.v_head_dim - 1).bit_length()))),
        "SEQUENCES": 128,
        "ONE_VECTOR": True,
        "PAGE_SIZE": page_size,
        "WIDE": False,
        "PACKED": page_size > 0,
        "PLACED": False,
        "WRITES_LSE": True,
    }
    if cache.code.uses_tanh:
        constants["APPROX"] = get_target(target).backend == "cuda"
    function = function_in(text, KERNEL)
    call = call_of(plan, function, types, constants, arguments=cache.arguments)
    return Kernel(text, KERNEL, call, gluon=False)


def compile_deciding(plan: KernelPlan, config: KernelConfig, target: str, rows: int) -> Report:
    """Everything it says of the kernel that decides tiles, for so many rows at a time."""
    cache = CachePlan(plan)
    text = IMPORTS + render_cache(plan)
    integers = ("decided_ptr", "counters_ptr", "kv_lens_ptr", "cu_seqlens_ptr")
    constants = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "ROWS": rows,
        "CHUNK": max(1, 2048 // (rows * config.BLOCK_N)),
        "LISTED": 1024,
        "PACKED": True,
    }
    types = dict.fromkeys(integers, "*i32")
    function = function_in(text, DECIDING)
    call = call_of(plan, function, types, constants, arguments=cache.deciding_arguments)
    kernel = Kernel(text, DECIDING, call, gluon=False)
    return report(kernel, target, options_of(replace(config, num_warps=4)), by_triton)
