"""The Gluon kernel's launch, seen on the CPU: when it runs, with what, and how it compiles."""

from __future__ import annotations

import ast
import functools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Tensor,
    alibi,
    block_sparse,
    causal,
    document,
)
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.shape import segment_table
from flashgen.kernels.workload import typical_params
from flashgen.plan import KernelPlan, lower
from support.cases import LAYOUTS, Case
from support.contract import native_inputs
from support.data_masks import data_mask
from support.specialised import NUM_SMS, watch, watch_hopper
from support.variants import gluon_specs, rendered_module

SPECS = gluon_specs()
SPECS["blocks_d64"] = AttentionSpec(
    64, mask=block_sparse(Tensor("layout", ("num_q_heads", None, None), "bool"), 16)
)

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 256, 300, 333, 400, 512, 513, 640)
INTS = (1, 2, 5, 16, 100, 1024, 2**30)
FLOATS = (1, 2.5, 16, 30.0, 31)  # numbers without a fraction are often written as int


@functools.cache
def _plan(name: str) -> KernelPlan:
    return lower(SPECS[name], name)


def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], name=name, hopper=True)


def _parameters(name: str, q: torch.Tensor, turn: int = 0) -> dict[str, Any]:
    """Of which every call has others."""
    values = typical_params(_plan(name), q)
    for param in SPECS[name].params:
        if isinstance(param, Int):
            values[param.name] = max(param.min, INTS[turn % len(INTS)])
        if isinstance(param, Float):
            values[param.name] = FLOATS[turn % len(FLOATS)]
    return values


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def _call(module: ModuleType, name: str, case: Case, *, turn: int = 0) -> tuple[torch.Tensor, ...]:
    """(q, k, v) of a call that has passed the checks, made on what says it is a GPU."""
    tensors = native_inputs(case, SPECS[name])
    params = _parameters(name, tensors[0], turn)
    q, k, v = (x.as_subclass(OnGpu) for x in tensors)
    module._forward(q, k, v, (None, 0.3, 1)[turn % 3] or 0.125, *params.values())
    return tensors


def _watched(
    name: str, monkeypatch: pytest.MonkeyPatch, module: ModuleType | None = None
) -> tuple[ModuleType, Any, Any]:
    """A module with a Hopper GPU made of the CPU, and its two kernels, which launch nothing."""
    module = module or _module(name)
    for kernel in ("_list_tiles", "_find_segment_tiles"):
        if hasattr(module, kernel):
            watch(module, monkeypatch, kernel)
    monkeypatch.setattr(module, "_config", lambda device: module.CONFIGS["sm_90"])
    return module, watch_hopper(module, monkeypatch), watch(module, monkeypatch)


@pytest.mark.parametrize("name", SPECS)
def test_one_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, hopper, portable = _watched(name, monkeypatch)
    for turn, length in enumerate(LENGTHS):
        heads = (1, 2, 4, 16)[turn % 4]
        case = Case(length, length, batch=turn % 3 + 1, q_heads=heads, kv_heads=heads)
        _call(module, name, case, turn=turn)
    assert len(hopper.keys) == 1, "\n".join(sorted(hopper.keys))
    assert len(hopper.grids) == len(LENGTHS) and not portable.grids


def test_a_second_compile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that Triton may specialise on a parameter."""

    def specialise(source: str) -> str:
        kernel = source.split("# Lengths, head counts and the mask's parameters", 2)[2]
        assert '"left"' in kernel, "the kernel no longer reads so: bring this test up to date"
        before = source.removesuffix(kernel)
        return before + kernel.replace('"left"', '"q_len"', 1)

    spec = SPECS["window_d128"]
    module = rendered_module(spec, hopper=True, edit_source=specialise)
    module, hopper, _ = _watched("window_d128", monkeypatch, module)
    for turn, _ in enumerate(INTS):
        _call(module, "window_d128", Case(32, 32), turn=turn)
    assert len(hopper.keys) == 3  # for 1, for multiples of 16, and for the others


@pytest.mark.parametrize("name", SPECS)
def test_the_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, (module, hopper, _) = _plan(name), _watched(name, monkeypatch)
    module.HOPPER_CONFIG.update(BLOCK_M=192, BLOCK_N=32, num_stages=3)
    lengths = (500, 500) if plan.equal_lengths else (500, 200)
    _, k, _ = _call(module, name, Case(*lengths, batch=3, q_heads=4, kv_heads=2))
    (given,), (grid,) = hopper.arguments, hopper.grids
    assert (given["BLOCK_M"], given["BLOCK_N"], given["NUM_STAGES"]) == (192, 32, 3)
    assert (given["num_q_heads"], given["num_kv_heads"]) == (4, 2)
    assert (given["q_len"], given["kv_len"]) == lengths
    if segment_table(plan):
        assert given["segment_tiles_ptr"].shape == (3 * 3 * 3 + 2,)
        assert given["out_ptr"].shape == (3, 4, 500, plan.v_head_dim)
    else:
        assert (given["num_tiles_m"], given["num_tiles"]) == (3, 3 * 3 * 4)
    assert grid == (min(NUM_SMS, 36 * (3 if segment_table(plan) else 1)),)
    assert given["heads_together"] == (4 if plan.tiles.uneven else 1)
    assert given["lse_ptr"].shape == (3, 4, 500)
    counts = HopperNames(plan).counts
    assert given["counter_ptr"].dtype == (torch.int32 if counts else torch.float32)
    if counts:
        assert given["counter_ptr"].tolist() == [0]
    for descriptor in HopperNames(plan).descriptors:
        tensor = descriptor.split("_")[0]
        shape = {"k": k.shape, "v": (*k.shape[:3], plan.v_head_dim)}
        shape |= {"q": (3, 4, 500, plan.qk_head_dim), "out": (3, 4, 500, plan.v_head_dim)}
        described = given[descriptor]
        assert tuple(described.shape) == tuple(shape[tensor])
        assert described.block_shape[:3] == [1, 1, 64 if tensor in ("q", "out") else 32]
        assert described.layout.element_bitwidth == 16
    if plan.listing:
        assert given["tiles_ptr"].shape == (4 * 3, 1 + math.ceil(200 / 32))


@pytest.mark.parametrize("by_batch", [True, False])
def test_what_tiles_of_queries_are_cut_by(by_batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that lie apart are copied; the table of where segments begin is of their shape."""
    shape = ("batch", "kv_len") if by_batch else ("kv_len",)
    ids = Tensor("ids", shape, "int32", sorted=True)
    module = rendered_module(AttentionSpec(128, mask=document(ids) & causal()), hopper=True)
    hopper, cut = (
        watch_hopper(module, monkeypatch),
        watch(module, monkeypatch, "_find_segment_tiles"),
    )
    q = torch.zeros(3, 6, 500, 128, dtype=torch.bfloat16).as_subclass(OnGpu)
    given = torch.zeros((3, 1000) if by_batch else (1000,), dtype=torch.int32)[..., ::2]
    module._forward(q, q, q, 0.1, given)
    (made,), (grid,), (passed,) = cut.arguments, cut.grids, hopper.arguments
    assert made["ids_ptr"].is_contiguous() and made["ids_ptr"].shape == given.shape
    assert (made["batch"], made["length"], made["num_ids"]) == (3, 500, given.numel())
    assert 2 ** made["steps"] > 500 >= 2 ** (made["steps"] - 1)
    assert made["BLOCK_M"] == passed["BLOCK_M"]
    entries = given.numel() // 500
    assert grid == (entries + math.ceil(given.numel() / made["CHUNK"]),)
    starts = 3 * math.ceil(500 / made["BLOCK_M"])
    assert (
        made["segment_tiles_ptr"].numel() == 3 * starts + 2
    )  # of the batch, and how many, and the end
    assert made["lists_ptr"].numel() == entries * (starts + 1)
    assert made["counter_ptr"] is passed["counter_ptr"]
    assert (
        passed["ids_begin_ptr"] is made["begin_ptr"]
        and passed["segment_tiles_ptr"] is made["segment_tiles_ptr"]
    )
    assert made["begin_ptr"].shape == given.shape and made["begin_ptr"].is_contiguous()
    assert passed["heads_together"] == 2  # a power of two that divides 6, not 3 * 6


def test_widths_of_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment each, of the output at most 128 columns; rows by the configuration."""
    spec = AttentionSpec((80, 256), mask=causal())
    module = rendered_module(spec, hopper=True)
    hopper = watch_hopper(module, monkeypatch)
    q, k = (torch.zeros(1, 2, 200, 80, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(1, 2, 200, 256, dtype=torch.bfloat16)
    module._launch_hopper(q, k, v, 0.1, {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 2})
    blocks = {
        name: tuple(value.block_shape[2:])
        for name, value in hopper.arguments[0].items()
        if "_desc" in name
    }
    assert blocks == {
        "q_desc_0": (64, 64), "q_desc_1": (64, 16), "k_desc_0": (32, 64), "k_desc_1": (32, 16),
        "v_desc": (32, 256), "out_desc": (64, 128),
    }  # fmt: skip


def test_a_launch_has_four_warps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first consumer's: Triton adds those of the other partitions."""
    module = _module("causal_d128")
    hopper = watch_hopper(module, monkeypatch)
    options = []
    launch = hopper._launch
    monkeypatch.setattr(hopper, "_launch", lambda *a, **kw: (options.append(kw), launch(*a, **kw)))
    _call(module, "causal_d128", Case(100, 100))
    assert options[0]["num_warps"] == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_kernel_runs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, hopper, portable = _watched("causal_d128", monkeypatch)
    case = Case(100, 100, batch=2, q_heads=2, kv_heads=2, layout=layout)
    tensors = _call(module, "causal_d128", case)
    reads = all(map(module._tma_reads, tensors))
    assert (len(hopper.grids), len(portable.grids)) == ((1, 0) if reads else (0, 1))


def test_some_layouts_are_for_each_kernel() -> None:
    module = _module("causal_d128")
    calls = [native_inputs(Case(9, 9, 2, 2, 2, layout), SPECS["causal_d128"]) for layout in LAYOUTS]
    assert {all(map(module._tma_reads, tensors)) for tensors in calls} == {True, False}


@pytest.mark.parametrize("which", range(3))
def test_one_tensor_that_tma_cannot_read_is_enough(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, hopper, portable = _watched("causal_d128", monkeypatch)
    tensors = [torch.zeros(1, 2, 40, 128, dtype=torch.bfloat16).as_subclass(OnGpu)] * 3
    tensors[which] = torch.zeros(1, 2, 40, 129, dtype=torch.bfloat16)[..., 1:].as_subclass(OnGpu)
    module._forward(*tensors, 0.1)
    assert (len(hopper.grids), len(portable.grids)) == (0, 1)


def test_the_interpreter_gets_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hopper, portable = _watched("causal_d128", monkeypatch)
    monkeypatch.setattr(module.triton.knobs.runtime, "interpret", True)
    module.attention(*native_inputs(Case(40, 40), SPECS["causal_d128"]))
    assert (len(hopper.grids), len(portable.grids)) == (0, 1)


def test_other_gpus_get_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module("causal_d128")
    capability = {"cuda:0": (9, 0), "cuda:1": (10, 0), "cuda:2": (8, 9), "cuda:3": (9, 4)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability[str(d)])
    assert [module._is_hopper(torch.device(name)) for name in capability] == [True, False] + [
        False
    ] * 2
    assert not module._is_hopper(torch.device("cpu"))


def test_amd_gpus_are_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs of capability 9.0 exist by torch's count."""
    module = _module("causal_d128")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    assert not module._is_hopper(torch.device("cuda:0"))


def _on_meta(batch: int, heads: int, length: int) -> torch.Tensor:
    return torch.empty(batch, heads, length, 128, dtype=torch.bfloat16, device="meta")


def _together(
    module: ModuleType, batch: int, q_heads: int, kv_heads: int, kv_len: int, packed: int = 1
) -> int:
    k = _on_meta(batch, kv_heads, kv_len)
    heads: int = module._heads_together(_on_meta(batch, q_heads, 8), k, k, packed)
    return heads


@pytest.mark.parametrize(
    "batch, q_heads, kv_heads, kv_len, expected",
    [
        (2, 16, 16, 2048, 16),  # 1 MiB of keys and values a head: 24 fit
        (4, 16, 16, 2048, 16),
        (1, 16, 16, 8192, 4),
        (1, 16, 4, 8192, 16),  # four heads share keys and values
        (1, 64, 4, 16384, 32),
        (1, 16, 16, 2**20, 1),  # not even one fits
        (1, 16, 2, 2**20, 8),  # nor here, and eight heads read the same
        (3, 5, 5, 128, 1),  # no power of two divides these
        (3, 4, 4, 128, 4),
        (1, 6, 2, 8192, 2),
        (1, 1, 1, 1, 1),
    ],
)
def test_heads_side_by_side(
    batch: int, q_heads: int, kv_heads: int, kv_len: int, expected: int
) -> None:
    heads = _together(_module("causal_d128"), batch, q_heads, kv_heads, kv_len)
    assert heads == expected


def test_heads_side_by_side_are_as_many_as_fit() -> None:
    module = _module("causal_d128")
    for q_heads, group in ((48, 1), (48, 3), (64, 4), (24, 8), (7, 7)):
        for kv_len in (1, 100, 5000, 8192, 16384, 60000):
            heads = _together(module, 2, q_heads, q_heads // group, kv_len)
            rows, head_bytes = 2 * q_heads, kv_len * 256 * 2

            def fits(n: int, group: int = group, head_bytes: int = head_bytes) -> bool:
                return math.ceil(n / group) * head_bytes <= module.L2_BYTES

            allowed = [1] + [n for n in (2**i for i in range(1, 12)) if rows % n == 0 and fits(n)]
            # One that no L2 holds: heads that share keys stay together all the same.
            if fits(1):
                assert heads == max(allowed)
            else:
                assert rows % heads == 0 and heads <= group


def test_every_stream_has_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, device = _module("causal_d128"), torch.device("cpu")
    stream, capturing = [1], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    driver = SimpleNamespace(get_current_stream=lambda device: stream[0])
    monkeypatch.setattr(module.triton.runtime.driver, "_active", driver)
    first = module._counter(device)
    assert first.dtype == torch.int32 and first.tolist() == [0]
    assert module._counter(device) is first
    stream[0] = 2
    second = module._counter(device)
    assert second is not first and second.data_ptr() != first.data_ptr()
    capturing[0] = True
    third, fourth = module._counter(device), module._counter(device)
    assert len({x.data_ptr() for x in (first, second, third, fourth)}) == 4
    capturing[0], stream[0] = False, 1
    assert module._counter(device) is first


def test_tiles_of_one_length_need_no_counter() -> None:
    """But in the one pass of the backward pass, which a deterministic one is not."""
    even = replace(SPECS["full_d128"], deterministic=True)
    assert not hasattr(rendered_module(even, name="even", hopper=True), "_counter")
    assert hasattr(_module("full_d128"), "_counter")


def test_nothing_to_compute_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hopper, _ = _watched("full_d128", monkeypatch)
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k = (torch.zeros(1, 2, n, 128, dtype=torch.bfloat16) for n in (q_len, kv_len))
        out, lse = module._launch_hopper(q, k, k, 0.1, module.HOPPER_CONFIG)
        assert out.shape == (1, 2, q_len, 128) and not out.any()
        assert (lse == -math.inf).all()
    assert not hopper.grids


@pytest.mark.parametrize("name", SPECS)
def test_no_name_stands_for_two_things(name: str) -> None:
    tree = ast.parse(Path(str(_module(name).__file__)).read_text())
    names = [f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name != "_"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("hopper", [False, True])
def test_gluon_is_imported_where_it_is_needed(hopper: bool) -> None:
    module = rendered_module(SPECS["causal_d128"], hopper=hopper)
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('m', {str(module.__file__)!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "print('triton.experimental.gluon' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{hopper}\n"


def test_constants_of_the_module_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = Constant("slopes", [0.5, 0.25, 0.125], dims=("num_q_heads",))
    spec = AttentionSpec(64, mask=causal(), score=alibi(slopes))
    module = rendered_module(spec, hopper=True)
    hopper = watch_hopper(module, monkeypatch)
    q = torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16)
    module._launch_hopper(q, q, q, 0.1, module.HOPPER_CONFIG)
    (given,) = hopper.arguments
    assert given["slopes_ptr"].tolist() == [0.5, 0.25, 0.125]


@pytest.mark.parametrize(("kv_len", "runs"), [(2**24, True), (2**24 + 1, False)])
def test_entries_of_lists_have_bits_for_so_many_keys(
    kv_len: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of an entry say which parts of a tile are seen."""
    spec = AttentionSpec(128, mask=data_mask("islands"))
    module = rendered_module(spec, hopper=True)
    monkeypatch.setattr(module, "_is_hopper", lambda _: True)
    q, k = (torch.empty(1, 1, n, 128, dtype=torch.bfloat16, device="meta") for n in (1, kv_len))
    monkeypatch.setattr(module, "_tma_reads", lambda x: x.shape[-1] == 128)
    assert module._runs_hopper(q, k, k) == runs
