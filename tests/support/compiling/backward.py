"""What Triton's compiler says of the backward kernels, for any target and without a GPU."""

from __future__ import annotations

from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.kernel import FUNCTIONS as BACKWARD_FUNCTIONS
from flashgen.kernels.backward_triton.kernel import render_backward
from flashgen.kernels.forward_triton.kernel import render_kernel
from flashgen.plan import KernelPlan
from flashgen.plan.backward import BackwardPlan
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_triton
from support.compiling.portable import (
    DROPOUT_TYPES,
    IMPORTS,
    constants_of,
    options_of,
    source_types,
)
from support.compiling.report import Report, report


def backward_shared_bytes(
    backward: BackwardPlan,
    kernel: BackwardKernel,
    config: KernelConfig,
    target: str,
    *,
    tma: bool | None,
) -> int:
    """The shared memory of a block of one kernel; stops before machine code is made.

    Args:
        backward: the plan.
        kernel: ``"keys"`` or ``"queries"``.
        config: its configuration.
        target: the architecture, which need not be here.
        tma: how tiles are copied; None is the target's own way.
    """
    of_call = portable_backward_kernel(backward, kernel, config, target, tma)
    return allotted_bytes(of_call, target, options_of(config))


def compile_backward(
    backward: BackwardPlan,
    kernel: BackwardKernel,
    config: KernelConfig,
    target: str,
    *,
    tma: bool | None,
) -> Report:
    """Everything the compiler says, down to machine code. As of `backward_shared_bytes`."""
    of_call = portable_backward_kernel(backward, kernel, config, target, tma)
    return report(of_call, target, options_of(config), by_triton)


def portable_backward_kernel(
    backward: BackwardPlan,
    kernel: BackwardKernel,
    config: KernelConfig,
    target: str,
    tma: bool | None,
) -> Kernel:
    """The kernel with the types and the alignment of a call's arguments."""
    plan = backward.plan
    uses_tma = plan.uses_tma(target) if tma is None else tma
    text = IMPORTS + render_kernel(plan) + "\n\n" + render_backward(backward)
    name = BACKWARD_FUNCTIONS[kernel]
    constants = constants_of(plan, config, target, uses_tma)
    arguments = backward.keys_arguments if kernel == "keys" else backward.queries_arguments
    types = _argument_types(plan, config, uses_tma)
    types |= {f"{item.variable}_ptr": "*fp32" for item in backward.input_gradients}
    call = call_of(plan, function_in(text, name), types, constants, arguments=arguments)
    return Kernel(text, name, call, gluon=False)


def _argument_types(plan: KernelPlan, config: KernelConfig, tma: bool) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    dtype = plan.triton_dtype
    types = {"rows_ptr": "*fp32", "scale": "fp32", "tiles_ptr": "*i32"} | DROPOUT_TYPES
    types |= {f"grad_{x}_ptr": f"*{dtype}" for x in "qkv"}
    rows = {"q": config.BLOCK_M, "k": config.BLOCK_N, "v": config.BLOCK_N}
    return types | source_types(plan, rows | {"grad_out": config.BLOCK_M}, tma)
