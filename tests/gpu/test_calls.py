"""Calls on the GPU: streams, graphs, the compiler, far memory, many heads, the same bits twice."""

from __future__ import annotations

import pytest
import torch

from gpu.launch import native, poison
from support.cases import Case, inputs
from support.contract import check_compiled, check_gradients
from support.oracle import check
from support.variants import GENERATED, import_file, shipped_module, shipped_specs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*eager reference")]

SPECS = shipped_specs()
NAME = "causal_d64"
CASE = Case(1000, 1000, batch=2, q_heads=8, kv_heads=2)


def _inputs(name: str, case: Case = CASE) -> tuple[torch.Tensor, ...]:
    return inputs(case, SPECS[name], native(SPECS[name]), "cuda")


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_twice(name: str) -> None:
    tensors = _inputs(name)
    results = []
    for _ in range(2):
        poison()
        results.append(shipped_module(name).attention(*tensors, return_lse=True))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_gradients(name: str) -> None:
    case = Case(150, 150, batch=2, q_heads=4, kv_heads=2)
    check_gradients(shipped_module(name), SPECS[name], case, device="cuda")


@pytest.mark.parametrize("name", SPECS)
def test_opcheck(name: str) -> None:
    case = Case(70, 70, q_heads=4, kv_heads=2, layout="transposed")
    tensors = [x.requires_grad_() for x in _inputs(name, case)]
    params = case.arguments(SPECS[name]).values()
    torch.library.opcheck(shipped_module(name)._attention_op, (*tensors, 0.1, *params))


@pytest.mark.parametrize("name", ["causal_d128", "causal_d192_v128", "window_d128"])
def test_compile_without_graph_breaks(name: str) -> None:
    check_compiled(shipped_module(name), SPECS[name], backend="inductor", device="cuda")


@pytest.mark.parametrize("name", SPECS)
def test_a_kernel_is_compiled_once_for_all_lengths(name: str) -> None:
    module = import_file(GENERATED / f"{name}.py")
    params = [{}, {param.name: 5 for param in SPECS[name].mask.params}]
    for length in (1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 250, 256, 333, 500, 512, 640):
        for heads in (1, 2, 8, 16):
            case = Case(length, length, batch=heads % 3 + 1, q_heads=heads, kv_heads=heads)
            for given in params:
                module.attention(*_inputs(name, case), **given)
    kernels, *_ = module._attention_forward.device_caches[0]
    assert len(kernels) == 1


@pytest.mark.parametrize("offset", [0, 1], ids=["tma", "pointers"])
def test_rows_that_lie_far_apart(offset: int) -> None:
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
    assert shipped_module(NAME)._tma_reads(tensors[0]) == (offset == 0)
    out, lse = shipped_module(NAME).attention(*tensors, return_lse=True)
    check(out, lse, tuple(tensors), spec, Case(length, length))


@pytest.mark.parametrize("offset", [0, 1], ids=["tma", "pointers"])
def test_heads_and_batches_that_lie_far_apart(offset: int) -> None:
    length, step, spec = 200, 2**30, SPECS[NAME]
    memory = torch.full((3 * step + 2**21,), torch.nan, dtype=native(spec), device="cuda")
    tensors = []
    for i in range(3):
        start = offset + i * 2**16
        view = memory.as_strided(
            (2, 2, length, spec.qk_head_dim), (step, 2 * step, spec.qk_head_dim, 1), start
        )
        tensors.append(view.copy_(torch.randn(view.shape, device="cuda")))
    out, lse = shipped_module(NAME).attention(*tensors, return_lse=True)
    case = Case(length, length, batch=2, q_heads=2, kv_heads=2)
    check(out, lse, tuple(tensors), spec, case)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000), (300, 300)])
def test_more_heads_than_a_grid_axis_holds(batch: int, heads: int) -> None:
    case = Case(17, 17, batch=batch, q_heads=heads, kv_heads=heads)
    tensors = _inputs(NAME, case)
    poison()
    out, lse = shipped_module(NAME).attention(*tensors, return_lse=True)
    check(out, lse, tensors, SPECS[NAME], case)


def test_outputs_of_more_than_2_to_31_elements() -> None:
    """Only the last head is compared: float64 of all would not fit."""
    heads, length, spec = 520, 2**16, SPECS["full_d64"]
    q = torch.randn(1, 1, length, 64, dtype=native(spec), device="cuda").expand(1, heads, -1, -1)
    k, v = (torch.randn(1, 1, 40, 64, dtype=native(spec), device="cuda") for _ in range(2))
    out, lse = shipped_module("full_d64").attention(q, k, v, return_lse=True)
    assert out.numel() > 2**31
    last = (q[:, -1:], k, v)
    check(out[:, -1:], lse[:, -1:], last, spec, Case(length, 40))


@pytest.mark.parametrize("name", SPECS)
def test_cuda_graphs(name: str) -> None:
    module = shipped_module(name)
    static, fresh = (
        _inputs(name, Case(300, 300, batch=batch, q_heads=4, kv_heads=2))[:3] for batch in (2, 3)
    )
    module.attention(*static)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.attention(*static)
    for old, new in zip(static, fresh, strict=True):
        old.copy_(new[:2])
    graph.replay()
    assert torch.equal(out, module.attention(*(x[:2] for x in fresh)))


def test_it_runs_on_the_current_stream() -> None:
    module, tensors = shipped_module(NAME), _inputs(NAME)
    right = module.attention(*tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what is launched elsewhere would overtake this
        late = tensors[0].clone()
        out = module.attention(late, *tensors[1:])
    stream.synchronize()
    assert torch.equal(out, right)
