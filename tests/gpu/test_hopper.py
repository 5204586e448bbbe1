"""The Gluon kernel on a Hopper GPU: which calls get it, and what could go wrong with it alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, block_sparse, causal
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import lower
from gpu.launch import (
    check_attention,
    check_hopper,
    module_of,
    native,
    poison,
)
from support.cases import LAYOUTS, Case, inputs
from support.oracle import check
from support.variants import gluon_specs, rendered_module

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SPECS = gluon_specs()

# Lengths beside the tiles' multiples, one tile and many, heads in groups and of no power of two.
CASES = (
    Case(1000, 1000, batch=2, q_heads=8, kv_heads=2),
    Case(129, 129, batch=1, q_heads=3, kv_heads=3),
    Case(2048, 2048, batch=3, q_heads=5, kv_heads=1),
    Case(7, 7, batch=2, q_heads=12, kv_heads=4),
)
UNEQUAL = (
    Case(1, 4099, batch=2, q_heads=6, kv_heads=2),
    Case(500, 17, batch=3, q_heads=7, kv_heads=7),
    Case(1500, 40, batch=1, q_heads=4, kv_heads=1),
    Case(129, 777, batch=2, q_heads=24, kv_heads=8),
)

# Few queries of grouped heads, of which programs have several tiles each.
GROUPED = (
    Case(1, 3000, batch=24, q_heads=32, kv_heads=4),
    Case(20, 700, batch=40, q_heads=8, kv_heads=1),
    Case(33, 33, batch=40, q_heads=24, kv_heads=6),
    Case(9, 9, batch=20, q_heads=64, kv_heads=1),
)
PACKING = [name for name, spec in SPECS.items() if HopperNames(lower(spec, name)).packs]


def _call(name: str, case: Case) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    spec = SPECS[name]
    return inputs(case, spec, native(spec), "cuda"), case.arguments(spec, "cuda")


def _cases(name: str) -> tuple[Case, ...]:
    return CASES if SPECS[name].equal_lengths else CASES + UNEQUAL


@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_kernel_runs(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable one where TMA cannot read q, k or v; both are right."""
    module, case = module_of("causal_d128", "hopper"), Case(300, 300, 2, 4, 2, layout)
    launched = []
    for launch in ("_launch", "_launch_hopper"):
        original = getattr(module, launch)

        def noted(*args: Any, launch: str = launch, original: Any = original) -> Any:
            launched.append(launch)
            return original(*args)

        monkeypatch.setattr(module, launch, noted)
    tensors, _ = _call("causal_d128", case)
    reads = all(map(module._tma_reads, tensors))
    check_attention(module, SPECS["causal_d128"], case)
    assert launched == ["_launch_hopper" if reads else "_launch"]


@pytest.mark.parametrize("name", SPECS)
def test_values(name: str) -> None:
    for case in _cases(name):
        check_attention(module_of(name, "hopper"), SPECS[name], case)


@pytest.mark.parametrize("case", GROUPED, ids=str)
@pytest.mark.parametrize("name", PACKING)
def test_rows_of_several_heads(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one tile, which pays for these; from the first launch and from repeated ones."""
    module, spec = module_of(name, "hopper"), SPECS[name]
    if spec.equal_lengths and case.q_len != case.kv_len:
        pytest.skip("it takes equal lengths alone")
    packed, original = [], module._packed_heads

    def noted(*given: Any) -> int:
        packed.append(original(*given))
        return int(packed[-1])

    monkeypatch.setattr(module, "_packed_heads", noted)
    tensors, params = _call(name, case)
    poison()
    first = module.attention(*tensors, return_lse=True, **params)
    check(*first, tensors, spec, case)
    assert packed == [case.q_heads // case.kv_heads]
    for _ in range(50):
        again = module.attention(*tensors, return_lse=True, **params)
        assert all(map(torch.equal, first, again))
        for x in again:
            x.fill_(torch.nan)


@pytest.mark.parametrize("cap", [0.5, 30.0, 55.0, 56.0, 500.0])
@pytest.mark.parametrize("scale", [0.1, 6.0])
def test_caps_small_and_large(cap: float, scale: float) -> None:
    """Scores of 60 times their usual size reach the caps."""
    for case in CASES:
        capped = replace(case, scale=scale, params={"cap": cap})
        check_attention(module_of("softcap_d128", "hopper"), SPECS["softcap_d128"], capped)


GROWTH = {
    "from_tile_to_tile": lambda n: torch.arange(n, 0, -1) / n * 6 + 0.1,
    "past_what_float32_holds": lambda n: 1.0 + 60.0 * (torch.arange(n) % 211 == 5),
    "in_the_first_tile_alone": lambda n: torch.where(torch.arange(n) < n - 100, 0.1, 9.0),
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("name", SPECS)
def test_weights_that_outgrow_their_first_maxima(name: str, growth: str) -> None:
    """Keys are visited from the last one on; here they weigh more and more, by many orders.

    There are several tiles of queries for each program, of which all, some or none are redone.
    """
    module, spec = module_of(name, "hopper"), SPECS[name]
    for case in (Case(1500, 1500, batch=2, q_heads=24, kv_heads=8), CASES[1]):
        (q, k, v), params = _call(name, case)
        k = (k * GROWTH[growth](case.kv_len).to("cuda")[:, None]).to(k.dtype)
        for factor in (1, 6):
            tensors = (q * factor, k, v)
            poison()
            first = module.attention(*tensors, return_lse=True, **params)
            check(*first, tensors, spec, case)
            assert torch.equal(first[0], module.attention(*tensors, **params))
            for _ in range(10):
                again = module.attention(*tensors, return_lse=True, **params)
                assert all(map(torch.equal, first, again))
                for x in again:
                    x.fill_(torch.nan)


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_two_hundred_times(name: str) -> None:
    """Warps that overtake one another would show."""
    module = module_of(name, "hopper")
    for case in _cases(name)[:3]:
        tensors, params = _call(name, case)
        poison()
        first = module.attention(*tensors, return_lse=True, **params)
        check(*first, tensors, SPECS[name], case)
        for _ in range(200):
            again = module.attention(*tensors, return_lse=True, **params)
            assert all(map(torch.equal, first, again))
            for x in again:
                x.fill_(torch.nan)  # the next call is likely to get this memory


@pytest.mark.parametrize("name", ["causal_d128", "causal_d64", "window_d128", "causal_d256"])
def test_two_streams_at_once(name: str) -> None:
    """Calls that share the SMs, and must not share a counter."""
    module = module_of(name, "hopper")
    calls = [_call(name, Case(n, n, batch=2, q_heads=6, kv_heads=2)) for n in (1500, 700)]
    right = [module.attention(*tensors, return_lse=True, **params) for tensors, params in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    for _ in range(50):
        for stream, (tensors, params), found in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(module.attention(*tensors, return_lse=True, **params))
    torch.cuda.synchronize()
    for found, expected in zip(results, right, strict=True):
        assert all(all(map(torch.equal, result, expected)) for result in found)


@pytest.mark.parametrize("name", ["causal_d128", "full_d128", "documents_d128"])
def test_a_graph_of_several_calls_beside_calls_of_its_own_stream(name: str) -> None:
    module = module_of(name, "hopper")
    calls = [_call(name, Case(n, n, batch=2, q_heads=6, kv_heads=2)) for n in (900, 333)]
    right = [module.attention(*tensors, **params) for tensors, params in calls]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = [module.attention(*tensors, **params) for tensors, params in calls]
    for _ in range(20):
        for out in captured:
            out.fill_(torch.nan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        beside = [module.attention(*tensors, **params) for tensors, params in calls]
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, right))
        assert all(map(torch.equal, beside, right))


@pytest.mark.filterwarnings("ignore:.*eager reference")
@pytest.mark.parametrize("name", ["causal_d128", "chunked_d128"])
def test_compiled_with_cuda_graphs_of_torchs_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first call of a stream comes while torch gives all memory to a graph."""
    module = module_of.__wrapped__(name, "hopper")  # whose streams have no counter yet
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch imports it by name
    tensors, params = _call(name, Case(256, 256, batch=2, q_heads=4, kv_heads=2))
    right = module.attention(*tensors, **params)
    module._counter_of.cache_clear()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module.attention(q, k, v, **params) * 1.0
        return out

    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*tensors), right)


def test_a_call_leaves_its_counter_at_0() -> None:
    module = module_of("causal_d128", "hopper")
    tensors, _ = _call("causal_d128", CASES[0])
    for _ in range(3):
        module.attention(*tensors)
        assert module._counter(tensors[0].device).item() == 0


def test_a_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    module = module_of("causal_d128", "hopper")
    tensors, _ = _call("causal_d128", CASES[0])
    right = module.attention(*tensors)
    there = module.attention(*(x.to("cuda:1") for x in tensors))
    assert torch.equal(there.to("cuda:0"), right)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_are_listed(head_dim: int) -> None:
    """A list a call, by tiles of the kernel's own size: 192 rows are no power of two."""
    table = Tensor("layout", ("num_q_heads", None, None), "bool")
    mask = block_sparse(table, 32) & causal(align="bottom_right")
    spec = AttentionSpec(head_dim, mask=mask)
    module = rendered_module(spec, hopper=True)
    for q_len, kv_len in ((500, 500), (700, 300), (100, 1000)):
        blocks = torch.rand(6, -(-q_len // 32), -(-kv_len // 32)) < 0.4
        case = Case(q_len, kv_len, 2, 6, 2, params={"layout": blocks})
        rows = 192 if head_dim == 64 else 128
        for stages in (2, 3) if head_dim == 64 else (2,):
            config = KernelConfig(rows, 128, num_warps=rows // 16, num_stages=stages)
            check_hopper(module, spec, case, config)
