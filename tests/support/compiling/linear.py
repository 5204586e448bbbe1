"""What Triton's compiler says of the kernels of linear attention, for any target, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.linear_triton.kernel import render_linear, render_linear_gradients
from flashgen.kernels.linear_triton.shared_memory import width_of_features
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

#: The kernels of random features, of each pass.
OF_FEATURES = {False: ("_linear_peaks", "_linear_features"), True: ("_feature_gradients",)}

#: Those of decays of features, of each pass.
OF_DECAYS = {
    False: ("_decayed_features",),
    True: ("_decayed_features", "_linear_backward_within_chunks"),
}

#: The kernels of each pass over all pairs, where ids return, and those that find where runs start.
OF_PAIRS = {
    False: ("_linear_runs", "_linear_returns", "_linear_pairs", "_linear_last_of_pairs"),
    True: (
        "_linear_pairs_of_queries",
        "_linear_pairs_of_keys",
        "_linear_pairs_of_values",
        "_linear_first_of_pairs",
    ),
}

#: Tensors of integers, which pointers name.
OF_INTEGERS = {"marks": "*i8"} | dict.fromkeys(("ids", "firsts", "tiles", "found", "shown"), "*i32")
OF_INTEGERS |= {"slots": "*i32", "parts": "*i32"}

#: Tensors of the call's dtype, which pointers name.
OF_DTYPE = ["x", "matrix", "phi", "grad_phi", "grad_x", "out", "grad_q", "grad_k", "grad_v"]
OF_DTYPE += ["q", "k", "phi_q", "phi_k", "decayed_q", "decayed_k", "weights", "grad_weights"]
OF_DTYPE += ["first", "grad_last"]


def linear_bytes(
    plan: KernelPlan,
    config: KernelConfig,
    target: str,
    *,
    gradients: bool,
    tma: bool,
    aligned: bool = True,
    packed: bool = False,
) -> dict[str, int]:
    """The shared memory of each function of a pass; stops before machine code is made.

    packed: of the functions for packed sequences, which read no tiles by TMA.
    """
    return (
        {
            f"{kernel.name} {kernel.call.constants}": (
                allotted_bytes(kernel, target, options_of(config))
            )
            for name in (GRADIENTS if gradients else FORWARD)
            for kernel in _kernels(plan, config, name, tma, aligned, packed)
        }
        | {
            kernel.name: allotted_bytes(kernel, target, options_of(of_rows(plan, config)))
            for name in OF_FEATURES[gradients] * LinearPlan(plan).random
            for kernel in _kernels(plan, of_rows(plan, config), name, tma, aligned, target=target)
        }
        | {
            f"{kernel.name} {kernel.call.constants}": (
                allotted_bytes(kernel, target, options_of(of_chunks(config)))
            )
            for name in OF_DECAYS[gradients] * LinearPlan(plan).by_features
            for kernel in _kernels(plan, config, name, tma, aligned)
        }
        | {
            kernel.name: allotted_bytes(kernel, target, options_of(of_pairs(config)))
            for name in OF_PAIRS[gradients] * LinearPlan(plan).of_ids
            for kernel in _kernels(plan, config, name, False, aligned)
        }
    )


def of_chunks(config: KernelConfig) -> KernelConfig:
    """How kernels of decays of features are launched, with a program for each chunk."""
    return replace(config, num_warps=4, num_stages=1)


def of_rows(plan: KernelPlan, config: KernelConfig) -> KernelConfig:
    """How kernels of random features are launched that do not sum up the rows of a chunk."""
    rows = max(LinearPlan(plan).rows_of_features, config.BLOCK_M)
    return replace(config, BLOCK_M=rows, num_warps=4, num_stages=1)


def of_pairs(config: KernelConfig) -> KernelConfig:
    """How kernels over all pairs are launched, and those that find where runs start."""
    return replace(config, num_stages=1)


def compile_linear(
    plan: KernelPlan, config: KernelConfig, target: str, name: str, packed: bool = False
) -> Report:
    """Everything the compiler says of a function, down to machine code; packed: see above."""
    pairs = name in OF_PAIRS[False] + OF_PAIRS[True]
    tma = plan.uses_tma(target) and not pairs and not packed
    *_, kernel = _kernels(plan, config, name, tma, True, packed)
    config = of_pairs(config) if pairs else config
    config = of_chunks(config) if name in OF_DECAYS[True] else config
    return report(kernel, target, options_of(config), by_triton)


def _kernels(
    plan: KernelPlan,
    config: KernelConfig,
    name: str,
    tma: bool,
    aligned: bool,
    packed: bool = False,
    target: str = "sm_90",
) -> Iterator[Kernel]:
    """The calls of a function that differ: for several heads of queries of a head of keys, and one.

    The last one is that of one head.
    """
    linear = LinearPlan(plan).of_tiles
    parts = (render(plan, packed=packed) for render in (render_linear, render_linear_gradients))
    text = IMPORTS + "\n\n".join(parts)
    function = function_in(text, name)
    pointer = f"*{plan.triton_dtype}"
    types = {x: "*fp32" for x in function.arg_names if x.endswith("_ptr")} | {"scale": "fp32"}
    types |= {x: pointer for x in types if x.removesuffix("_ptr") in OF_DTYPE} | {"root": "fp32"}
    types |= {f"{x}_ptr": y for x, y in OF_INTEGERS.items()}
    for tensor in (x for x in function.arg_names if x.endswith("_src")):
        of_features = tensor in ("q_src", "k_src", "phi_q_src", "phi_k_src")
        width = linear.qk_width if of_features else linear.v_width
        tile = f"[1, 1, {config.BLOCK_M}, {width}]"
        types[tensor] = f"tensordesc<{plan.triton_dtype}{tile}>" if tma else pointer
    constants = {"CHUNK": config.BLOCK_M, "USE_TMA": tma, "STAGES": config.num_stages}
    constants |= {"SHIFTS": config.BLOCK_M.bit_length() - 1, "stride_df": 1}
    constants |= {"WIDTH": width_of_features(plan, get_target(target))}
    constants = {
        x: y
        for x, y in (constants | {"OF_ROWS": False, "BLOCK": 1024, "SIDE": 64}).items()
        if x in function.arg_names
    }
    of_tiles = [{"ADDS": x, "ENDS": x} for x in (False, True)]
    of_heads, by_chunks = ([{x: y} for y in (True, False)] for x in ("GROUPED", "STEEP"))
    variants = [
        x for x in (of_tiles, of_heads, by_chunks) if next(iter(x[0])) in function.arg_names
    ]
    for chosen in product(*variants):
        more = {x: y for part in chosen for x, y in part.items()}
        call = call_of(plan, function, types, constants | more, aligned)
        # Pointers and strides of the other arguments are as a launcher finds them.
        known = {x: y for x, y in call.signature.items() if x in function.arg_names}
        given = {x: y for x, y in call.constants.items() if x in function.arg_names}
        yield Kernel(text, name, type(call)(known, given, call.attributes), gluon=False)
