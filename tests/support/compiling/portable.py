"""What Triton's compiler says of the portable kernel, for any target and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.plan import KernelPlan
from support.compiling.compiler import FUSED
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_triton
from support.compiling.report import Report, report

#: Triton's types of what kernels take of dropout, but for integers.
DROPOUT_TYPES = {"seed_ptr": "*i64", "kept_scale": "fp32"}

KERNEL = "_attention_forward"
IMPORTS = "import triton\nimport triton.language as tl\n\n\n"


def shared_bytes(
    plan: KernelPlan,
    config: KernelConfig,
    target: str,
    *,
    tma: bool | None = None,
    aligned: bool = True,
) -> int:
    """The shared memory of a block, from the compiler; stops before machine code is made.

    Args:
        plan: the kernel.
        config: its configuration.
        target: the architecture, which need not be here.
        tma: how tiles are copied; None is the target's own way.
        aligned: every stride is a multiple of 16, as the compiler likes it.
    """
    uses_tma = plan.uses_tma(target) if tma is None else tma
    kernel = forward_kernel(plan, config, target, tma=uses_tma, aligned=aligned)
    return allotted_bytes(kernel, target, options_of(config))


def compile_kernel(
    plan: KernelPlan,
    config: KernelConfig,
    target: str,
    *,
    tma: bool | None = None,
    aligned: bool = True,
) -> Report:
    """Everything the compiler says, down to machine code. Arguments as of `shared_bytes`."""
    uses_tma = plan.uses_tma(target) if tma is None else tma
    kernel = forward_kernel(plan, config, target, tma=uses_tma, aligned=aligned)
    return report(kernel, target, options_of(config), by_triton)


def options_of(config: KernelConfig) -> dict[str, Any]:
    """What the compiler takes of a configuration."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **FUSED}


def forward_kernel(
    plan: KernelPlan, config: KernelConfig, target: str, *, tma: bool, aligned: bool = True
) -> Kernel:
    """The kernel with the types and the alignment of a call's arguments, as of `shared_bytes`."""
    text = IMPORTS + render_kernel(plan)
    constants = constants_of(plan, config, target, tma)
    types = _argument_types(plan, config, tma)
    call = call_of(plan, function_in(text, KERNEL), types, constants, aligned)
    return Kernel(text, KERNEL, call, gluon=False)


def constants_of(plan: KernelPlan, config: KernelConfig, target: str, tma: bool) -> dict[str, Any]:
    """What a kernel of Triton's is compiled with."""
    constants: dict[str, Any] = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    constants["USE_TMA"] = tma
    if plan.code.uses_tanh:
        constants["APPROX"] = get_target(target).backend == "cuda"
    if plan.dropout:
        constants["DROPS"] = True
    return constants


def _argument_types(plan: KernelPlan, config: KernelConfig, tma: bool) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    dtype = plan.triton_dtype
    types = {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "qk_scale": "fp32", "scale": "fp32"}
    types |= {"tiles_ptr": "*i32"} | DROPOUT_TYPES
    rows = {"q": config.BLOCK_M, "k": config.BLOCK_N, "v": config.BLOCK_N}
    return types | source_types(plan, rows, tma)


def source_types(plan: KernelPlan, rows: Mapping[str, int], tma: bool) -> dict[str, str]:
    """Triton's types of the pointers, or descriptors, that tiles are read through.

    Args:
        plan: the kernel.
        rows: of the tiles of each tensor, by its name.
        tma: descriptors, else pointers.
    """
    types, dtype = {}, plan.triton_dtype
    for tensor, count in rows.items():
        for part in plan.qk_parts if tensor in ("q", "k") else plan.v_parts:
            descriptor = f"tensordesc<{dtype}[1, 1, {count}, {part.width}]>"
            types[f"{tensor}_src{part.suffix}"] = descriptor if tma else f"*{dtype}"
    return types
