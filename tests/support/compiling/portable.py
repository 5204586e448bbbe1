"""What Triton's compiler says of the portable kernel, for any target and without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.plan import KernelPlan
from support.compiling.compiler import FUSED, Compiled, gpu_target, number_in
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in

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


def compile_kernel(plan: KernelPlan, config: KernelConfig, target: str) -> Compiled:
    """Everything the compiler says, down to machine code. Arguments as of `shared_bytes`."""
    import triton

    kernel = forward_kernel(plan, config, target, tma=plan.uses_tma(target))
    options = options_of(config)
    compiled = triton.compile(kernel.source(), target=gpu_target(target), options=options)
    return figures(compiled, target)


def figures(kernel: Any, target: str) -> Compiled:
    """What a kernel that Triton has compiled for a target needs."""
    if get_target(target).backend == "hip":
        registers, spilled = _amd_registers(kernel.asm["amdgcn"])
    else:
        registers, spilled = _nvidia_registers(kernel.asm["cubin"])
    return Compiled(int(kernel.metadata.shared), registers, spilled)


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


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a Triton kernel has a stack for spills alone."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return number_in(usage, r"REG:(\d+)"), number_in(usage, r"STACK:(\d+)")


def _amd_registers(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, accumulation registers among them, and bytes spilled."""
    spilled = number_in(assembly, r"\.vgpr_spill_count:\s*(\d+)")
    return number_in(assembly, r"\.vgpr_count:\s*(\d+)"), 4 * spilled
