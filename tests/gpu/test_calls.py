"""Calls on the GPU: streams, graphs, the compiler, far memory, many heads, the same bits twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.utils.flop_counter import FlopCounterMode

from flashgen import Float, Int
from gpu.launch import module_of, native, poison
from support.cases import Case, inputs
from support.contract import check_compiled, check_gradients
from support.oracle import check
from support.variants import shipped_module, shipped_specs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*eager reference")]

SPECS = shipped_specs()
NAME = "causal_d64"
CASE = Case(1000, 1000, batch=2, q_heads=8, kv_heads=2)


def _inputs(name: str, case: Case = CASE) -> tuple[torch.Tensor, ...]:
    return inputs(case, SPECS[name], native(SPECS[name]), "cuda")


def _params(name: str, case: Case = CASE) -> dict[str, Any]:
    return case.arguments(SPECS[name], "cuda")


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_twice(name: str, form: str) -> None:
    tensors, params = _inputs(name), _params(name)
    results = []
    for _ in range(2):
        poison()
        results.append(module_of(name, form).attention(*tensors, return_lse=True, **params))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_gradients(name: str, form: str) -> None:
    case = Case(150, 150, batch=2, q_heads=4, kv_heads=2)
    check_gradients(module_of(name, form), SPECS[name], case, device="cuda")


@pytest.mark.parametrize("name", SPECS)
def test_opcheck(name: str, form: str) -> None:
    case = Case(70, 70, q_heads=4, kv_heads=2, layout="transposed")
    tensors = [x.requires_grad_() for x in _inputs(name, case)]
    params = _params(name, case).values()
    torch.library.opcheck(module_of(name, form).op, (*tensors, 0.1, *params))


@pytest.mark.parametrize("name", [
    "causal_d128", "causal_d192_v128", "window_d128", "documents_d128", "softcap_d128",
    "sinks_softmax_d64",
])  # fmt: skip
def test_compile_without_graph_breaks(name: str, form: str) -> None:
    check_compiled(module_of(name, form), SPECS[name], backend="inductor", device="cuda")


def test_a_program_that_was_exported_without_a_gpu_runs_the_kernel(tmp_path: Path) -> None:
    module = shipped_module(NAME)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return module.attention(q, k, v)

    length = torch.export.Dim("length", min=2, max=4096)
    tensors = inputs(Case(64, 64, batch=2, q_heads=8, kv_heads=2), SPECS[NAME], torch.bfloat16)
    shapes = ({2: length}, {2: length}, {2: length})
    program = torch.export.export(Layer(), tensors, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    q, k, v = _inputs(NAME)
    assert torch.equal(loaded(q, k, v), module.attention(q, k, v))


def test_flops_of_both_passes(form: str) -> None:
    module = module_of(NAME, form)
    leaves = [x.requires_grad_() for x in _inputs(NAME)]
    with FlopCounterMode(display=False) as counter:
        module.attention(*leaves).sum().backward()
    pairs = 2 * 8 * (1000 * 1001 // 2)
    assert dict(counter.get_flop_counts()["Global"]) == {
        module.op.overloadpacket: 4 * 64 * pairs,
        module.op_backward.overloadpacket: 10 * 64 * pairs,
    }


LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    31,
    64,
    100,
    127,
    128,
    129,
    250,
    256,
    333,
    500,
    512,
    640,
    777,
    900,
    999,
)
SIZES = (0, 1, 2, 5, 16, 17, 100, 128, 1000, 1024, 2**30)


@pytest.mark.parametrize("name", SPECS)
def test_no_length_compiles_a_kernel_again(
    name: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Nor a window size, cap, or tensor: Triton's own count, and what its hook is told."""
    module = module_of.__wrapped__(name, form)  # none of whose kernels is compiled yet
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr)
    )
    for turn, length in enumerate(LENGTHS):
        for heads in (1, 2, 8, 16):
            numbers = {
                param.name: max(SIZES[turn % len(SIZES)], param.min)
                for param in SPECS[name].params
                if isinstance(param, Int)
            } | {
                param.name: (30, 2.5, 1)[turn % 3]
                for param in SPECS[name].params
                if isinstance(param, Float)
            }
            if SPECS[name].dropout:
                numbers["dropout_p"] = (0.1, 0.5, 0.9)[turn % 3]
            case = Case(length, length, heads % 3 + 1, heads, heads, params=numbers)
            module.attention(*_inputs(name, case), **_params(name, case))
    if form == "portable":
        kernels = ("_attention_forward", "_find_rows")
        launched = {kernel: 1 for kernel in kernels if hasattr(module, kernel)}
    elif hasattr(module, "_find_segment_tiles"):
        launched = {"_attention_hopper": 1, "_find_segment_tiles": 1}
    else:  # few queries have two consumers
        launched = {"_attention_hopper": 2 if module.HOPPER_CONFIG["BLOCK_M"] > 128 else 1}
    counts = {name: len(getattr(module, name).device_caches[0][0]) for name in launched}
    assert counts == launched
    assert len(compiled) == sum(counts.values()), compiled


@pytest.mark.parametrize("name", SPECS)
def test_a_mask_takes_memory_in_proportion_to_the_length(name: str, form: str) -> None:
    """At its peak, beyond the output and the log-sum-exp: where documents begin, and the like.

    By what is asked for: a block that torch has kept may be larger than that by up to a megabyte.
    """
    for length in (4096, 16384):
        case = Case(length, length, q_heads=16, kv_heads=16)
        tensors, params = _inputs(name, case), _params(name, case)
        for _ in range(2):  # the first call compiles
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            out, lse = module_of(name, form).attention(*tensors, return_lse=True, **params)
            torch.cuda.synchronize()
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
            extra = peak - before - out.nbytes - lse.nbytes
            del out, lse
        assert extra <= 16 * length, f"{extra} bytes at {length}"


@pytest.mark.parametrize("offset", [0, 1], ids=["tma", "pointers"])
def test_rows_that_lie_far_apart(offset: int, form: str) -> None:
    """The last row begins past 2^31 elements."""
    length, step, spec = 2200, 2**20, SPECS[NAME]
    memory = torch.full((length * step,), torch.nan, dtype=native(spec), device="cuda")
    tensors = []
    for i in range(3):
        start = offset + i * spec.qk_head_dim
        view = memory.as_strided(
            (1, 1, length, spec.qk_head_dim), (length * step, length * step, step, 1), start
        )
        tensors.append(view.copy_(torch.randn(view.shape, device="cuda")))
    assert module_of(NAME, form)._tma_reads(tensors[0]) == (offset == 0)
    out, lse = module_of(NAME, form).attention(*tensors, return_lse=True)
    check(out, lse, tuple(tensors), spec, Case(length, length))


@pytest.mark.parametrize("offset", [0, 1], ids=["tma", "pointers"])
def test_heads_and_batches_that_lie_far_apart(offset: int, form: str) -> None:
    length, step, spec = 200, 2**30, SPECS[NAME]
    memory = torch.full((3 * step + 2**21,), torch.nan, dtype=native(spec), device="cuda")
    tensors = []
    for i in range(3):
        start = offset + i * 2**16
        view = memory.as_strided(
            (2, 2, length, spec.qk_head_dim), (step, 2 * step, spec.qk_head_dim, 1), start
        )
        tensors.append(view.copy_(torch.randn(view.shape, device="cuda")))
    out, lse = module_of(NAME, form).attention(*tensors, return_lse=True)
    case = Case(length, length, batch=2, q_heads=2, kv_heads=2)
    check(out, lse, tuple(tensors), spec, case)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
def test_more_heads_than_a_grid_axis_holds(batch: int, heads: int, form: str) -> None:
    case = Case(17, 17, batch=batch, q_heads=heads, kv_heads=heads)
    tensors = _inputs(NAME, case)
    poison()
    out, lse = module_of(NAME, form).attention(*tensors, return_lse=True)
    check(out, lse, tensors, SPECS[NAME], case)


def test_outputs_of_more_than_2_to_31_elements(form: str) -> None:
    """Only the last head is compared: float64 of all would not fit."""
    heads, length, spec = 520, 2**16, SPECS["full_d64"]
    q = torch.randn(1, 1, length, 64, dtype=native(spec), device="cuda").expand(1, heads, -1, -1)
    k, v = (torch.randn(1, 1, 40, 64, dtype=native(spec), device="cuda") for _ in range(2))
    out, lse = module_of("full_d64", form).attention(q, k, v, return_lse=True)
    assert out.numel() > 2**31
    last = (q[:, -1:], k, v)
    check(out[:, -1:], lse[:, -1:], last, spec, Case(length, 40))


@pytest.mark.parametrize("name", SPECS)
def test_cuda_graphs(name: str, form: str) -> None:
    """Of a call whose tensors change between replays, those of the parameters too."""
    module = module_of(name, form)
    cases = [Case(300, 300, batch=2, q_heads=4, kv_heads=2, scale=scale) for scale in (0.1, 0.2)]
    static, fresh = ((_inputs(name, case), _params(name, case)) for case in cases)
    module.attention(*static[0], **static[1])  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.attention(*static[0], **static[1])
    for old, new in zip(
        (*static[0], *static[1].values()), (*fresh[0], *fresh[1].values()), strict=True
    ):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    assert torch.equal(out, module.attention(*fresh[0], **fresh[1]))


def test_it_runs_on_the_current_stream(form: str) -> None:
    module, tensors = module_of(NAME, form), _inputs(NAME)
    right = module.attention(*tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what is launched elsewhere would overtake this
        late = tensors[0].clone()
        out = module.attention(late, *tensors[1:])
    stream.synchronize()
    assert torch.equal(out, right)
