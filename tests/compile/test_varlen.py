"""The Gluon kernels for packed sequences: shared memory, and machine code beside the dense ones."""

from __future__ import annotations

import pytest
from triton.compiler import ASTSource

from flashgen import AttentionSpec, Int, causal, sliding_window
from flashgen.budget.targets import get_target
from flashgen.config import HOPPER, KernelConfig
from flashgen.forms.varlen import MORE_SHARED
from flashgen.kernels.backward_hopper.kernel import BackwardHopper
from flashgen.plan.backward import backward_plan
from support.compiling.backward_hopper import (
    compile_backward_hopper,
    compile_backward_hopper_varlen,
)
from support.compiling.compiler import FUSED
from support.compiling.hopper import (
    compile_hopper,
    compile_hopper_cached,
    compile_hopper_varlen,
)
from support.compiling.report import Report, report_of
from support.data_masks import data_mask
from support.variants import first_on_hopper, lowered, rendered_module

#: By head dimension: bytes of a thread's numbers in memory beyond the dense kernel's. At d=64 three
#: consumers have no register to spare for the lengths of a sequence.
SPILLED = {128: 0, 64: 128}
SPECS = {head_dim: AttentionSpec(head_dim, mask=causal()) for head_dim in SPILLED}
WINDOW = AttentionSpec(
    128,
    mask=sliding_window(Int("left", 1000), 0),
    align="bottom_right",
    forms=("dense", "varlen", "cache"),
)


#: The Triton kernels around the Gluon kernels: constants, warps and registers.
BESIDE = {
    "_list_and_fill": (
        {"HAS_KV_LENS": True, "COLUMNS": 128, "BLOCK": 192, "SLOTS": 8, "CHUNK": 64, "SPAN": 1024},
        1,
        128,
    ),
    "_list_both_tiles": ({"HAS_KV_LENS": True, "SLOTS": 8, "CHUNK": 64}, 1, 128),
    "_padded_rows": ({"HAS_GRAD_LSE": True, "DIVIDED": True, "SLOTS": 8, "CHUNK": 128}, 4, 72),
    "_place_packed_sums": ({}, 4, 96),
    "_list_cache_tiles": (
        {"PACKED": True, "PLACED": True, "BLOCK": 48, "SLOTS": 8, "CHUNK": 64, "SPAN": 1024},
        1,
        128,
    ),
    "_merge_cache_splits": ({"BLOCK": 48, "ROWS": 16}, 4, 144),
}
LISTS = ("places", "slots", "tiles", "pieces", "cu_seqlens", "kv_lens")


@pytest.mark.parametrize("name", BESIDE)
def test_beside_the_gluon_kernels(name: str) -> None:
    """Each becomes machine code, with a window's parameter among its arguments; none spills."""
    module = rendered_module(WINDOW, name="window_d128", hopper=True)
    kernel, (constants, warps, registers) = getattr(module, name), BESIDE[name]
    sizes = {"ROWS": 128, "BLOCK_M": 64, "BLOCK_N": 128}
    constants = {x: size for x, size in sizes.items() if x in kernel.arg_names} | constants

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if not argument.endswith("_ptr"):
            return "fp32" if argument == "scale" else "i32"
        if argument.removesuffix("_ptr").startswith(LISTS):
            return "*i32"
        return "*fp32" if argument.startswith(("rows", "sums", "parts", "lse", "outs")) else "*bf16"

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or argument.startswith("stride")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    found = report_of(source, HOPPER, {"num_warps": warps, **FUSED})
    assert found.spilled == 0 and found.registers <= registers


@pytest.mark.parametrize("head_dim", SPILLED)
def test_forward(head_dim: int) -> None:
    plan, config = lowered(SPECS[head_dim]), first_on_hopper(SPECS[head_dim])
    dense, varlen = compile_hopper(plan, config), compile_hopper_varlen(plan, config)
    _hold(dense, varlen, SPILLED[head_dim])


def test_lists() -> None:
    """Between tiles alone numbers rest in memory, but for a few that a masked step reads."""
    spec = AttentionSpec(128, mask=data_mask("islands"), forms=("dense", "varlen"))
    plan, config = lowered(spec), first_on_hopper(spec)
    found = compile_hopper(plan, config), compile_hopper_varlen(plan, config)
    _hold(*found, spilled=16)
    assert not found[1].unset
    [config, *_] = BackwardHopper().space(plan, HOPPER).candidates
    backward = backward_plan(plan)
    dense = compile_backward_hopper(backward, config)
    _hold(dense, compile_backward_hopper_varlen(backward, config), spilled=128)


def test_lists_of_narrow_heads() -> None:
    """All columns at once, elements that are handed over would spill 200 bytes more."""
    spec = AttentionSpec(64, mask=data_mask("islands"), forms=("dense", "varlen"))
    plan, config = lowered(spec), first_on_hopper(spec)
    varlen = compile_hopper_varlen(plan, config)
    _hold(compile_hopper(plan, config), varlen, spilled=16)
    assert not varlen.unset


@pytest.mark.parametrize(("head_dim", "page_size", "packed"), [(64, 0, 1), (128, 16, 4)])
def test_forward_of_a_cache(head_dim: int, page_size: int, packed: int) -> None:
    spec = AttentionSpec(head_dim, mask=causal(align="bottom_right"))
    plan, config = lowered(spec), first_on_hopper(spec)
    dense = compile_hopper(plan, config, packed)
    cached = compile_hopper_cached(plan, config, page_size, packed)
    _hold(dense, cached, SPILLED[head_dim] + 16)
    # Of keys in parts the output needs no shared memory; where there are more spills, they rest
    # there from one tile of queries to the next.
    parts = compile_hopper_cached(plan, config, page_size, packed, split=True)
    assert parts.shared <= cached.shared and not parts.warnings
    assert parts.spilled <= cached.spilled + 16


@pytest.mark.parametrize("split", [False, True])
def test_two_consumers_of_a_cache(split: bool) -> None:
    """Their tiles of twice the keys spill nothing, and fit beside what a cache needs."""
    plan = lowered(AttentionSpec(128, mask=causal(align="bottom_right")))
    config = KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2)
    found = compile_hopper_cached(plan, config, 16, 1, split=split)
    assert found.spilled == 0 and not found.warnings
    assert found.shared <= get_target(HOPPER).max_shared


@pytest.mark.parametrize("head_dim", [128, 80])
@pytest.mark.parametrize("divided", [False, True])
def test_backward(head_dim: int, divided: bool) -> None:
    plan = lowered(AttentionSpec(head_dim, mask=causal()))
    [config, *_] = BackwardHopper().space(plan, HOPPER).candidates
    backward = backward_plan(plan)
    dense = compile_backward_hopper(backward, config)
    varlen = compile_backward_hopper_varlen(backward, config, divided=divided)
    # Between tiles of keys alone: loops over queries are the dense kernel's.
    _hold(dense, varlen, spilled=80)


def _hold(dense: Report, varlen: Report, spilled: int) -> None:
    assert 0 < varlen.shared - dense.shared <= MORE_SHARED
    assert varlen.spilled <= dense.spilled + spilled
    assert not varlen.warnings
