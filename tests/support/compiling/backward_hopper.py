"""What Triton's compiler and ptxas say of the Gluon kernel of the backward pass, without a GPU."""

from __future__ import annotations

from flashgen.config import HOPPER, KernelConfig
from flashgen.forms.varlen import views_of
from flashgen.kernels.backward_hopper.kernel import render_over_keys
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.views import views_in_gluon
from flashgen.plan import TRITON_DTYPES
from flashgen.plan.arguments import KernelArguments
from flashgen.plan.backward import BackwardPlan
from support.compiling.figures import allotted_bytes
from support.compiling.hopper import (
    IMPORTS,
    OPTIONS,
    constants_of,
    descriptor,
)
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_stages
from support.compiling.portable import DROPOUT_TYPES
from support.compiling.report import Report, report
from support.variants import render_backward_hopper

# Tensors whose rows are as wide as those of v.
OF_VALUES = ("v", "grad_v", "grad_out")

KERNEL, OF_QUERIES = "_backward_hopper", "_backward_queries_hopper"


def backward_hopper_shared_bytes(backward: BackwardPlan, config: KernelConfig) -> int:
    """The shared memory of a block; stops before machine code is made."""
    return allotted_bytes(backward_kernel(backward, config), HOPPER, OPTIONS)


def compile_backward_hopper(backward: BackwardPlan, config: KernelConfig) -> Report:
    """Everything that the compiler and ptxas say, down to machine code."""
    return report(backward_kernel(backward, config), HOPPER, OPTIONS, by_stages)


def compile_backward_hopper_varlen(
    backward: BackwardPlan, config: KernelConfig, *, divided: bool = True
) -> Report:
    """The same of the kernel for packed sequences."""
    views = views_in_gluon(backward.both_arguments, views_of(backward.plan))
    names = HopperBackward(backward, of_sequences=True, views=views)
    tiles = {"q": config.BLOCK_M, "grad_out": config.BLOCK_M}
    tiles |= {"k": config.BLOCK_N, "v": config.BLOCK_N, "grad_k": 64, "grad_v": 64}
    types = _descriptors(names, tiles)
    types["rows_desc"] = descriptor("fp32", "float32", [1, 1, config.BLOCK_M])
    types |= _descriptors_of_sums(names)
    types |= dict.fromkeys(("counter_ptr", "list_ptr", "tiles_ptr"), "*i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("grad_k_ptr", "grad_v_ptr"), f"*{backward.plan.triton_dtype}")
    text = IMPORTS + render_over_keys(
        names, "backward_hopper/kernel.py.jinja", after_forward=False, gathers=names.gathers
    )
    function, arguments = function_in(text, KERNEL), backward.both_arguments
    constants = constants_of(config) | {"DIVIDED": divided}
    call = call_of(backward.plan, function, types, constants, arguments=arguments)
    return report(Kernel(text, KERNEL, call, gluon=True), HOPPER, OPTIONS, by_stages)


def queries_shared_bytes(backward: BackwardPlan) -> int:
    """The shared memory of a block of the Gluon kernel that computes the gradient of q."""
    return allotted_bytes(queries_kernel(backward), HOPPER, OPTIONS)


def compile_queries(backward: BackwardPlan) -> Report:
    """What compiler and ptxas say of the Gluon kernel that computes the gradient of q."""
    return report(queries_kernel(backward), HOPPER, OPTIONS, by_stages)


def backward_kernel(
    backward: BackwardPlan, config: KernelConfig, *, divided: bool = True, learns: bool = True
) -> Kernel:
    """The kernel with the types and the alignment of a call's arguments.

    Args:
        backward: whose kernel it is.
        config: its configuration.
        divided: whether some tiles have parts, if any may: what whole tiles alone need is less.
        learns: whether gradients of learned tensors are computed, if there are any.
    """
    names = HopperBackwardSplit(backward)
    tiles = dict.fromkeys(("q", "grad_out"), config.BLOCK_M)
    tiles |= {"k": config.BLOCK_N, "v": config.BLOCK_N, "grad_k": 64, "grad_v": 64}
    types = _descriptors(names, tiles)
    types["rows_desc"] = descriptor("fp32", "float32", [1, 1, config.BLOCK_M])
    if not names.split:
        types |= _descriptors_of_sums(names)
        types["counter_ptr"] = "*i32"
    types |= dict.fromkeys(names.learned, "*fp32")
    of_tensors = {x.name: x.dtype for x in backward.plan.arguments if x.kind == "tensor"}
    for item in names.pairs:
        dtype = of_tensors[item.tensor]
        types[f"{item.variable}_ptr"] = f"*{TRITON_DTYPES[dtype]}"
        types[f"{item.variable}_desc"] = descriptor(TRITON_DTYPES[dtype], dtype, [1, 1, 64, 64])
        types[f"tiles_of_{item.tensor}"] = types[f"{item.variable}_desc"]
    constants = constants_of(config, drops=backward.plan.dropout)
    constants |= {"DIVIDED": divided} if names.divides else {}
    constants |= {"LEARNS": learns} if names.may_skip else {}
    constants |= {"TILED": names.tiled_itemsize == 2} if names.tiled_in_ds else {}
    return _kernel(backward, KERNEL, types, constants, backward.both_arguments)


def queries_kernel(backward: BackwardPlan) -> Kernel:
    """The one that computes the gradient of q alone, likewise."""
    names = HopperBackwardSplit(backward)
    constants = dict(names.of_queries.constants)
    constants |= {"DROPS": True} if backward.plan.dropout else {}
    tiles = dict.fromkeys(("q", "grad_out"), constants["BLOCK_M"])
    tiles |= dict.fromkeys(("k", "v"), constants["BLOCK_N"])
    types = _descriptors(names, tiles | {"grad_q": 64}) | {"rows_ptr": "*fp32"}
    types |= dict.fromkeys(names.of_queries.learned.pointers, "*fp32")
    return _kernel(backward, OF_QUERIES, types, constants, backward.queries_arguments)


def _kernel(
    backward: BackwardPlan,
    name: str,
    types: dict[str, str],
    constants: dict[str, int],
    arguments: KernelArguments,
) -> Kernel:
    text = IMPORTS + render_backward_hopper(backward)
    types = types | {"scale": "fp32", "tiles_ptr": "*i32"} | DROPOUT_TYPES
    function = function_in(text, name)
    call = call_of(backward.plan, function, types, constants, arguments=arguments)
    return Kernel(text, name, call, gluon=True)


def _descriptors_of_sums(names: HopperBackward) -> dict[str, str]:
    """Triton's types of the descriptors of sums, and of parts, by the width of a segment."""
    types = {}
    for width in names.sums_widths:
        suffix = f"_{width}" if names.segmented else ""
        sums = descriptor("fp32", "float32", [128, width // 2])
        types[f"grad_q_desc{suffix}"] = types[f"parts_desc{suffix}"] = sums
    return types


def _descriptors(names: HopperBackward, tiles: dict[str, int]) -> dict[str, str]:
    """Triton's types of the descriptors of tensors, by the rows of a tile."""
    plan = names.backward.plan
    parts = {name: names.v_parts if name in OF_VALUES else names.qk_parts for name in tiles}
    return {
        f"{name}_desc{part.suffix}": descriptor(
            plan.triton_dtype, plan.torch_dtype, [1, 1, rows, part.width]
        )
        for name, rows in tiles.items()
        for part in parts[name]
    }
