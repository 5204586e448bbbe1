"""What Triton's compiler says of the kernels of linear attention, for any target, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.config import KernelConfig
from flashgen.kernels.linear_triton.kernel import render_linear, render_linear_gradients
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan
from support.compiling.figures import allotted_bytes
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_triton
from support.compiling.portable import IMPORTS, options_of
from support.compiling.report import Report, report

#: The functions of each pass that go through chunks; others map tensors beforehand.
FORWARD = ("_linear_states", "_linear_forward")
GRADIENTS = (
    "_linear_states",
    "_linear_backward_of_queries",
    "_linear_states_of_queries",
    "_linear_backward_of_keys",
    "_linear_backward_of_values",
)


def linear_bytes(
    plan: KernelPlan,
    config: KernelConfig,
    target: str,
    *,
    gradients: bool,
    tma: bool,
    aligned: bool = True,
) -> dict[str, int]:
    """The shared memory of each function of a pass; stops before machine code is made."""
    return {
        f"{kernel.name} {kernel.call.constants}": (
            allotted_bytes(kernel, target, options_of(config))
        )
        for name in (GRADIENTS if gradients else FORWARD)
        for kernel in _kernels(plan, config, name, tma, aligned)
    }


def compile_linear(plan: KernelPlan, config: KernelConfig, target: str, name: str) -> Report:
    """Everything the compiler says of a function, down to machine code."""
    *_, kernel = _kernels(plan, config, name, plan.uses_tma(target), True)
    return report(kernel, target, options_of(config), by_triton)


def _kernels(
    plan: KernelPlan, config: KernelConfig, name: str, tma: bool, aligned: bool
) -> Iterator[Kernel]:
    """The calls of a function that differ: for several heads of queries of a head of keys, and one.

    The last one is that of one head.
    """
    linear = LinearPlan(plan).of_tiles
    text = f"{IMPORTS}{render_linear(plan)}\n\n{render_linear_gradients(plan)}"
    function = function_in(text, name)
    pointer = f"*{plan.triton_dtype}"
    types = {x: "*fp32" for x in function.arg_names if x.endswith("_ptr")} | {"scale": "fp32"}
    written = ("out_ptr", "grad_q_ptr", "grad_k_ptr", "grad_v_ptr")
    types |= dict.fromkeys(written, pointer)
    for tensor in (x for x in function.arg_names if x.endswith("_src")):
        of_features = tensor in ("q_src", "k_src", "phi_q_src", "phi_k_src")
        width = linear.qk_width if of_features else linear.v_width
        tile = f"[1, 1, {config.BLOCK_M}, {width}]"
        types[tensor] = f"tensordesc<{plan.triton_dtype}{tile}>" if tma else pointer
    constants = {"CHUNK": config.BLOCK_M, "USE_TMA": tma}
    of_tiles = (
        [{"ADDS": x, "ENDS": x} for x in (False, True)] if "ADDS" in function.arg_names else [{}]
    )
    of_heads = [{"GROUPED": x} for x in (True, False)] if "GROUPED" in function.arg_names else [{}]
    for more in (a | b for a in of_tiles for b in of_heads):
        call = call_of(plan, function, types, constants | more, aligned)
        # Pointers and strides of the other arguments are as a launcher finds them.
        known = {x: y for x, y in call.signature.items() if x in function.arg_names}
        yield Kernel(text, name, type(call)(known, call.constants, call.attributes), gluon=False)
