"""What Triton's compiler and ptxas say of the Gluon kernel of the backward pass, without a GPU."""

from __future__ import annotations

from typing import Any

from flashgen.codegen.render import render_backward_hopper
from flashgen.config import KernelConfig
from flashgen.plan.backward import BackwardPlan
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.tuning.compiled_hopper import (
    IMPORTS,
    HopperCompiled,
    constants_of,
    descriptor,
    figures_of,
    shared_until,
)
from flashgen.tuning.compiler import call_of, function_in

KERNEL = "_backward_hopper"


def backward_hopper_shared_bytes(backward: BackwardPlan, config: KernelConfig) -> int:
    """The shared memory of a block; stops before machine code is made."""
    return shared_until(_source(backward, config))


def compile_backward_hopper(backward: BackwardPlan, config: KernelConfig) -> HopperCompiled:
    """Everything that the compiler and ptxas say, down to machine code."""
    return figures_of(_source(backward, config))


def _source(backward: BackwardPlan, config: KernelConfig) -> Any:
    """The kernel with the types and the alignment of a call's arguments."""
    from triton.experimental.gluon._runtime import GluonASTSource

    text = IMPORTS + render_backward_hopper(backward, after_forward=False)
    kernel = function_in(text, KERNEL)
    arguments = backward.both_arguments
    types = _argument_types(backward, config)
    call = call_of(backward.plan, kernel, types, constants_of(config), arguments=arguments)
    return GluonASTSource(kernel, call.signature, call.constants, call.attributes)


def _argument_types(backward: BackwardPlan, config: KernelConfig) -> dict[str, str]:
    """Triton's types of the arguments that are no integers, but for those of parameters."""
    plan = backward.plan
    width = HopperBackward(backward).width
    tiles = {"q": config.BLOCK_M, "grad_out": config.BLOCK_M}
    tiles |= {"k": config.BLOCK_N, "v": config.BLOCK_N, "grad_k": 64, "grad_v": 64}
    types = {
        f"{name}_desc": descriptor(plan.triton_dtype, plan.torch_dtype, [1, 1, rows, width])
        for name, rows in tiles.items()
    }
    types["rows_desc"] = descriptor("fp32", "float32", [1, 1, config.BLOCK_M])
    types["grad_q_desc"] = descriptor("fp32", "float32", [128, 32])
    types |= {f"{item.variable}_ptr": "*fp32" for item in backward.of_both.learned}
    return types | {"scale": "fp32", "counter_ptr": "*i32"}
