"""What Triton's compiler says of the backward kernels, for any target and without a GPU."""

from __future__ import annotations

from typing import Any

from flashgen.budget.targets import get_target
from flashgen.codegen.render import render_backward, render_kernel
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.backward import BackwardPlan
from flashgen.tuning.compiled import IMPORTS, figures
from flashgen.tuning.compiler import Compiled, call_of, compile_until, function_in, gpu_target

#: The kernels by what they go over tiles of.
FUNCTIONS = {"keys": "_backward_of_keys", "queries": "_backward_of_queries"}


def backward_shared_bytes(
    backward: BackwardPlan, kernel: str, config: KernelConfig, target: str, *, tma: bool | None
) -> int:
    """The shared memory of a block of one kernel; stops before machine code is made.

    Args:
        backward: the plan.
        kernel: ``"keys"`` or ``"queries"``.
        config: its configuration.
        target: the architecture, which need not be here.
        tma: how tiles are copied; None is the target's own way.
    """
    source = _source(backward, kernel, config, target, tma)
    return int(compile_until("llir", source, target, _options(config)).metadata["shared"])


def compile_backward(
    backward: BackwardPlan, kernel: str, config: KernelConfig, target: str, *, tma: bool | None
) -> Compiled:
    """Everything the compiler says, down to machine code. As of `backward_shared_bytes`."""
    import triton

    source = _source(backward, kernel, config, target, tma)
    compiled = triton.compile(source, target=gpu_target(target), options=_options(config))
    return figures(compiled, target)


def _options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _source(
    backward: BackwardPlan, kernel: str, config: KernelConfig, target: str, tma: bool | None
) -> Any:
    """The kernel with the types and the alignment of a call's arguments."""
    from triton.compiler import ASTSource

    plan = backward.plan
    uses_tma = plan.uses_tma(target) if tma is None else tma
    text = IMPORTS + render_kernel(plan) + "\n\n" + render_backward(plan)
    function = function_in(text, FUNCTIONS[kernel])
    constants: dict[str, Any] = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    constants["USE_TMA"] = uses_tma
    if plan.code.uses_tanh:
        constants["APPROX"] = get_target(target).backend == "cuda"
    arguments = backward.keys_arguments if kernel == "keys" else backward.queries_arguments
    types = _argument_types(plan, config, uses_tma)
    types |= {f"{item.variable}_ptr": "*fp32" for item in backward.of_queries.learned}
    call = call_of(plan, function, types, constants, arguments=arguments)
    return ASTSource(function, call.signature, constexprs=call.constants, attrs=call.attributes)


def _argument_types(plan: KernelPlan, config: KernelConfig, tma: bool) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    dtype = plan.triton_dtype
    types = {"rows_ptr": "*fp32", "scale": "fp32", "tiles_ptr": "*i32"}
    types |= {f"grad_{x}_ptr": f"*{dtype}" for x in "qkv"}
    tensors = (
        ("q", config.BLOCK_M, plan.qk_parts),
        ("k", config.BLOCK_N, plan.qk_parts),
        ("v", config.BLOCK_N, plan.v_parts),
        ("grad_out", config.BLOCK_M, plan.v_parts),
    )
    for tensor, rows, parts in tensors:
        for part in parts:
            descriptor = f"tensordesc<{dtype}[1, 1, {rows}, {part.width}]>"
            types[f"{tensor}_src{part.suffix}"] = descriptor if tma else f"*{dtype}"
    return types
