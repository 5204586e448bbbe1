"""Linear attention over all pairs becomes machine code, in the memory that is predicted."""

from __future__ import annotations

import pytest

from compile.usage import (
    AS_PTXAS_12_8_DOES,
    check_backward_usage,
    check_usage,
    hold_never_below,
    predicted_usage,
)
from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    causal,
    document,
    elu_plus_one,
    favor,
    identity,
    linear,
    prefix_lm,
    relu,
    sliding_window,
    softmax_features,
)
from flashgen.budget.targets import get_target
from flashgen.config import BACKWARD_KERNELS, KernelConfig
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.space import split_space
from flashgen.kernels.backward_triton.rank import rank_backward
from flashgen.kernels.backward_triton.shared_memory import backward_usage
from flashgen.kernels.backward_triton.space import backward_space
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.kernels.forward_triton.space import search_space
from flashgen.kernels.linear_triton.maps import names_of_maps, render_maps
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.quadratic import QuadraticPlan
from support.compiling.backward import backward_shared_bytes
from support.compiling.backward_hopper import compile_backward_hopper
from support.compiling.hopper import IMPORTS as OF_GLUON
from support.compiling.hopper import compile_hopper
from support.compiling.kernel import Kernel, call_of, function_in
from support.compiling.machine_code import by_triton
from support.compiling.portable import IMPORTS, options_of, shared_bytes
from support.compiling.report import Report, report
from support.variants import render_backward_hopper

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
WINDOW = sliding_window(100, 0)
SPECS = {
    "elu": AttentionSpec(64, mask=WINDOW, normaliser=linear(elu_plus_one())),
    "plain": AttentionSpec(128, mask=WINDOW, normaliser=linear(identity(), normalise=False)),
    "tf32": AttentionSpec(
        64, "float32", mask=prefix_lm(30), normaliser=linear(relu()), input_precision="tf32"
    ),
    "unequal": AttentionSpec(
        (96, 40), mask=causal(), normaliser=linear(relu(), algorithm="quadratic")
    ),
    "heads": AttentionSpec(
        64, mask=WINDOW, normaliser=linear(elu_plus_one(), decay=lambda h: -0.1)
    ),
    "random": AttentionSpec(64, mask=WINDOW, normaliser=linear(favor(256))),
}
#: Whose elements are counted whole: see the modules that predict.
NEVER_BELOW = {
    "decays": AttentionSpec(64, mask=WINDOW, normaliser=linear(relu(), decay=DECAY)),
    "documents": AttentionSpec(64, mask=document(), normaliser=linear(elu_plus_one())),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_chosen_configurations_need_what_is_predicted(name: str) -> None:
    plan, target = lower(SPECS[name], name), "sm_90"
    config = rank(plan, target, search_space(plan, target).candidates)[0][0]
    for tma in (True, False):
        predicted = sram_usage(plan, config, get_target(target), tma=tma)
        assert predicted.total == shared_bytes(plan, config, target, tma=tma), predicted.breakdown
    for kernel in BACKWARD_KERNELS:
        candidates = backward_space(plan, kernel, target).candidates
        config = rank_backward(plan, kernel, target, candidates)[0]
        for tma in (True, False):
            predicted = backward_usage(plan, kernel, config, get_target(target), tma=tma)
            backward = backward_plan(plan)
            needed = backward_shared_bytes(backward, kernel, config, target, tma=tma)
            assert predicted.total == needed, predicted.breakdown


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", NEVER_BELOW)
def test_elements_need_no_more_than_is_predicted(name: str, target: str) -> None:
    """Also of tiles with as many rows as threads, for which two vectors of rows are exchanged."""
    plan = lower(NEVER_BELOW[name], name)
    for config in (KernelConfig(128, 64, 4, 2), KernelConfig(64, 64, 4, 2)):
        predicted = sram_usage(plan, config, get_target(target)).total
        assert predicted >= shared_bytes(plan, config, target)
    for kernel in BACKWARD_KERNELS:
        candidates = backward_space(plan, kernel, target).candidates
        hold_never_below(plan, kernel, target, rank_backward(plan, kernel, target, candidates)[:2])


@pytest.mark.parametrize("name", ["plain", "documents", "decays"])
def test_gluon_kernels_need_what_is_predicted(name: str) -> None:
    """Of the forward kernel, that reads the scale, and of the one of all gradients."""
    plan = lower((SPECS | NEVER_BELOW)[name], name)
    check_usage(plan, hopper_space(plan).candidates[0])
    names = HopperBackwardSplit(backward_plan(plan))
    for config in split_space(names).candidates:
        check_backward_usage(names, config)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", ["elu", "plain"])
def test_gluon_kernels_are_fast_machine_code(name: str) -> None:
    """A few numbers rest in memory between tiles."""
    plan = lower(SPECS[name], name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    names = HopperBackwardSplit(backward_plan(plan))
    forward = compile_hopper(plan, config)
    backward = compile_backward_hopper(names.backward, split_space(names).candidates[0])
    assert forward.shared == predicted_usage(plan, config).total
    assert (forward.warnings, backward.warnings) == ((), ())
    assert forward.spilled <= 32
    assert backward.spilled <= 160


@pytest.mark.parametrize("mask", [causal(), WINDOW], ids=["parts", "window"])
def test_what_decays_learn_of_sums_becomes_machine_code(mask: Mask) -> None:
    """With two segments of columns, whose products are added up."""
    of = linear(relu(), decay=DECAY, algorithm="quadratic")
    plan = lower(AttentionSpec(96, mask=mask, normaliser=of), "decays")
    text = OF_GLUON + render_backward_hopper(backward_plan(plan))
    function = function_in(text, "_place_sums")
    types = {x: f"*{plan.triton_dtype}" for x in function.arg_names if x.endswith("_ptr")}
    types |= {x: "*fp32" for x in types if x.startswith(("sums", "parts", "total"))}
    constants = {"BLOCK_N": 128} if "BLOCK_N" in function.arg_names else {}
    call = call_of(plan, function, types | {"scale": "fp32"}, constants)
    options = options_of(KernelConfig(64, 64, 4, 1))
    assert report(Kernel(text, "_place_sums", call, gluon=False), "sm_90", options, by_triton)


def compiled_map(quadratic: QuadraticPlan, name: str, target: str = "sm_90") -> Report:
    """Everything the compiler says of a kernel that maps q and k, or their gradients."""
    plan = quadratic.maps.plan
    text = IMPORTS + render_maps(quadratic)
    function = function_in(text, name)
    pointer = f"*{plan.triton_dtype}"
    types = {x: pointer for x in function.arg_names if x.endswith("_ptr")}
    types |= {"peaks_ptr": "*fp32", "root": "fp32"}
    widths = names_of_maps(quadratic, (target,)).get("widths_of_features", {target: 0})
    constants = {"CHUNK": quadratic.chunk, "WIDTH": widths[target], "OF_ROWS": False}
    constants |= {"sums_of_chunks_ptr": None}
    known = {x: y for x, y in constants.items() if x in function.arg_names}
    call = call_of(plan, function, types, known)
    config = KernelConfig(quadratic.chunk, 16, 4, 1 if quadratic.random else 3)
    return report(Kernel(text, name, call, gluon=False), target, options_of(config), by_triton)


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(128, mask=WINDOW, normaliser=linear(elu_plus_one())),
        AttentionSpec(512, mask=WINDOW, normaliser=linear(softmax_features())),
        AttentionSpec(128, mask=WINDOW, normaliser=linear(favor(256))),
    ],
    ids=["elu", "vectors", "random"],
)
def test_kernels_of_maps_spill_little(spec: AttentionSpec) -> None:
    quadratic = QuadraticPlan(lower(spec, "maps"))
    for name in ("_linear_features", "_feature_gradients"):
        found = compiled_map(quadratic, name)
        assert (
            found.spilled <= 48 * quadratic.random
            and found.shared <= get_target("sm_90").max_shared
        )
