"""The kernels of masks that read block tables, or only data knows, through Triton's compiler."""

from __future__ import annotations

from typing import Any

import pytest
from triton.compiler import ASTSource

from compile.usage import AS_PTXAS_12_8_DOES
from flashgen import AttentionSpec, Mask, Tensor, bigbird, block_sparse, causal, document
from flashgen.budget.targets import DEFAULT_TARGETS, get_target
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.kernels.forward_triton.shared_memory import sram_usage
from flashgen.plan import TRITON_DTYPES, KernelPlan, lower
from flashgen.plan.classified import ClassifiedTiles
from support.compiling.hopper import compile_hopper
from support.compiling.portable import compile_kernel
from support.compiling.predicted import predicted_usage
from support.compiling.report import report_of
from support.data_masks import data_mask
from support.variants import rendered_module

LIMITS = Tensor("limits", ("q_len",), "int32")

MASKS: dict[str, Mask] = {
    "block_sparse": block_sparse(),
    "bigbird": bigbird(64),
    "static": block_sparse([[i * j % 3 == 0 for j in range(8)] for i in range(8)]),
    "causal": causal() & block_sparse(block=64),
    "documents": document() & causal() & ~block_sparse(),
    "by_element": block_sparse(block=128) & Mask(lambda b, h, q, kv: LIMITS[q] >= kv, "limits"),
}


def _plan(name: str) -> KernelPlan:
    return lower(AttentionSpec(128, "bfloat16", mask=MASKS[name]), name)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("name", MASKS)
def test_the_list_becomes_machine_code(name: str) -> None:
    plan = _plan(name)
    kernel = rendered_module(plan.spec)._list_tiles
    tensors = plan.listing_arguments.tensors
    constants = {"BLOCK_M": 128, "BLOCK_N": 64, "CHUNK": 128}
    if plan.listing.reduce_rows:
        constants["ROWS"] = 128
    constants |= {f"{x.name}_stride_{x.ndim - 1}": 1 for x in tensors}
    types = {"tiles_ptr": "*i32"}
    types |= {f"{x.name}_ptr": f"*{TRITON_DTYPES[x.dtype]}" for x in tensors}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    for target in DEFAULT_TARGETS:
        found = report_of(source, target, {})
        assert found.shared <= 1024, target  # what the running sum passes on


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_keys_and_values_arrive_ahead(name: str, stages: int) -> None:
    """What is read of the list delays no copy, and no table moves the scores out of registers."""
    plan = _plan(name)
    config = KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=stages)
    compiled = compile_kernel(plan, config, "sm_90")
    a_tile_of_each = 64 * (128 + 128) * plan.itemsize
    assert compiled.shared >= 128 * 128 * plan.itemsize + stages * a_tile_of_each
    assert compiled.shared <= sram_usage(plan, config, get_target("sm_90")).total
    assert compiled.spilled == 0


#: What the kernels that decide and list tiles take besides tensors.
CONSTANTS = {
    "_classify_tiles": {"TILE": 64},
    "_list_tiles": {
        "OWN": 128, "LISTED": 128, "OF_KEYS": True, "TILE": 64, "PARTS": 2, "CHUNK": 128,
    },
}  # fmt: skip


def _deciding(name: str, function: str, *, aligned: bool = False) -> tuple[ASTSource, int]:
    """A kernel that decides or lists tiles, and its warps; tensors with aligned rows or any."""
    plan = lower(AttentionSpec(128, "bfloat16", mask=data_mask(name)), name)
    kernel = getattr(rendered_module(plan.spec), function)
    read = plan.listing_arguments
    constants, warps = dict(CONSTANTS[function]), 4  # Triton's own number
    if function == "_classify_tiles":
        assert isinstance(plan.listing, ClassifiedTiles)
        warps = plan.listing.warps
        constants["ROWS"] = plan.listing.rows_at_once
    types = {"bits_ptr": "*i32", "tiles_ptr": "*i32"}
    types |= {x: "fp32" for x in read.scalars if x not in read.ints}
    types |= {f"{x.name}_ptr": f"*{TRITON_DTYPES[x.dtype]}" for x in read.tensors}
    strides = {f"{x.name}_stride_{x.ndim - 1}": 1 for x in read.tensors}
    constants |= {name: 1 for name in strides if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    of_tensors = tuple(f"{x.name}_" for x in read.tensors)
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if aligned
        and name.startswith(of_tensors)
        and name not in constants
        and not kernel.params[place].do_not_specialize
    }
    return ASTSource(kernel, signature, constexprs=constants, attrs=attrs), warps


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("function", CONSTANTS)
@pytest.mark.parametrize("name", ["islands", "gate", "heat", "dense"])
def test_what_decides_tiles_becomes_machine_code(name: str, function: str) -> None:
    source, warps = _deciding(name, function)
    for target in DEFAULT_TARGETS:
        found = report_of(source, target, {"num_warps": warps})
        assert found.shared <= 2048, target  # what sums pass on
    assert report_of(source, "sm_90", {"num_warps": warps}).spilled == 0


#: The elements of a table that a thread reads: 16 rows of 8 tiles by 128 threads, or 64 rows and 32
#: tiles by 32; of the latter also 16 of each tile, one by one. Then how many it loads at once.
LOADED = {"dense": (64, 0, 16), "gate": (64, 32, 4)}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", LOADED)
def test_rows_of_a_table_are_loaded_several_elements_at_a_time(name: str) -> None:
    """Where its address and rows are multiples of 16 bytes, which Triton looks at in each call."""
    elements, alone, at_once = LOADED[name]
    for aligned in (True, False):
        source, warps = _deciding(name, "_classify_tiles", aligned=aligned)
        loads = report_of(source, "sm_90", {"num_warps": warps}).opcodes["LDG"]
        assert loads == (elements // at_once if aligned else elements) + alone


_IDS, _FLAG = Tensor("ids", ("batch", "kv_len"), "int32"), Tensor("flag", ("kv_len",), "bool")
_OF_ID = Tensor("of_id", ("q_len", None), "bool")


def _two_of_each_key(b: Any, h: Any, q: Any, kv: Any) -> Any:
    near = _FLAG[q] | _FLAG[kv] | (abs(q - kv) <= 40)
    return near & ((kv <= q) | (_IDS[b, q] == _IDS[b, kv]))


#: Masks that read elements of keys, and head dimensions.
ELEMENTS = {
    "two_of_each_key": (Mask(_two_of_each_key, "two"), 64),
    "at_a_place_that_is_handed_over": (
        Mask(lambda b, h, q, kv: _OF_ID[q, _IDS[b, kv]] & (kv <= q + 70), "of_ids"),
        128,
    ),
}


@AS_PTXAS_12_8_DOES
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_of_keys_have_registers(name: str) -> None:
    """Those of all columns at once would spill some 1,600 bytes, and 112 of queries and keys."""
    mask, head_dim = ELEMENTS[name]
    plan = lower(AttentionSpec(head_dim, "bfloat16", mask=mask), name)
    config = rank_hopper(plan, hopper_space(plan).candidates)[0]
    compiled = compile_hopper(plan, config)
    assert compiled.spilled <= 96
    assert compiled.shared == predicted_usage(plan, config).total
