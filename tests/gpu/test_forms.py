"""Packed sequences, and caches, on a GPU: whatever kernel a call takes, against float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Float,
    Int,
    Tensor,
    alibi,
    causal,
    full,
    sliding_window,
    softcap,
    softmax,
)
from support.cached import CacheCall, cached, check_cached
from support.cases import Case
from support.packed import Packing, hold_all_gradients, hold_outputs, offsets, packed
from support.variants import rendered_module

pytestmark = pytest.mark.gpu

SLOPES, SINKS = Tensor("slopes", ("num_q_heads",)), Tensor("sinks", ("num_q_heads",))
_VARLEN, _CACHE = ("dense", "varlen"), ("dense", "cache")
#: Beside those that the Gluon kernels compute, some whose backward pass, or both, are portable.
VARLEN = {
    "causal_d64": AttentionSpec(64, mask=causal(), forms=_VARLEN),
    "causal_d128": AttentionSpec(128, "float16", mask=causal(), forms=_VARLEN),
    "full_d96": AttentionSpec(96, mask=full(), forms=_VARLEN),
    "cross_d192": AttentionSpec((192, 128), mask=causal(), align="bottom_right", forms=_VARLEN),
    "window_d128": AttentionSpec(
        128,
        mask=sliding_window(Int("left", 100), 0),
        align="bottom_right",
        score=softcap(Float("cap", 20.0, above=0)),
        forms=_VARLEN,
    ),
    "learned_d64": AttentionSpec(
        64,
        mask=causal(),
        align="bottom_right",
        score=alibi(SLOPES),
        normaliser=softmax(sink=SINKS),
        forms=_VARLEN,
    ),
}
_HEADS = Case(0, 0, q_heads=6, kv_heads=2)
ALIKE = Packing((513, 0, 1, 130, 64, 300, 2), padding=13, case=_HEADS)
CROSS = Packing(
    (513, 0, 1, 130, 64, 310, 2),
    (600, 100, 0, 129, 64, 310, 700),
    (1, 0, 5, 200, 0, 64, 3),
    padding=13,
    case=_HEADS,
)


@functools.cache
def _varlen(name: str) -> ModuleType:
    return rendered_module(VARLEN[name], hopper=True)


def _packings(spec: AttentionSpec) -> list[Packing]:
    return [ALIKE] if spec.equal_lengths else [ALIKE, CROSS]


@pytest.mark.parametrize("name", VARLEN)
def test_packed_sequences(name: str) -> None:
    spec, module = VARLEN[name], _varlen(name)
    for packing in _packings(spec):
        call = packed(spec, packing, getattr(torch, spec.dtype), "cuda")
        qkv = [x.requires_grad_() for x in call.qkv]
        learned = {n: x for n, x in call.params.items() if isinstance(x, torch.Tensor)}
        leaves = [*qkv, *(x.requires_grad_() for x in learned.values())]
        out, lse = module.varlen_attention(
            *qkv, **call.lengths, **call.params, return_lse=True, scale=spec.scale
        )
        hold_outputs(spec, packing, call, out.detach(), lse.detach(), gluon=True)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        end = sum(packing.q_lens)
        grad_out[end:], grad_lse[end:] = torch.nan, torch.nan
        grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
        grads = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
        hold_all_gradients(spec, packing, call, grads, grad_out, grad_lse)


def test_a_graph_reads_the_lengths_of_each_replay() -> None:
    module = _varlen("causal_d64")
    q, k, v = (torch.randn(1024, h, 64, device="cuda").bfloat16() for h in (6, 2, 2))
    cu_seqlens = offsets((512, 512), "cuda")
    call = functools.partial(module.varlen_attention, q, k, v)
    call(cu_seqlens, cu_seqlens, 1024, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(cu_seqlens, cu_seqlens, 1024, 1024)
    for lens in ((512, 512), (1, 1023), (0, 1024)):
        cu_seqlens.copy_(offsets(lens, "cuda"))
        graph.replay()
        assert torch.equal(out, call(cu_seqlens, cu_seqlens, 1024, 1024))


def test_broken_lengths_change_no_other_sequence() -> None:
    module = _varlen("full_d96")
    q, k, v = (torch.randn(1024, h, 96, device="cuda").bfloat16() for h in (6, 2, 2))
    right = offsets((300, 0, 400, 324), "cuda")
    wrong = right.clone()
    wrong[3] = 10**9
    out = module.varlen_attention(q, k, v, right, right.clone(), 400, 400)
    broken = module.varlen_attention(q, k, v, wrong, right, 400, 400)
    assert torch.equal(out[:300], broken[:300]) and bool(broken[300:].isnan().all())


CACHES = {
    "causal": AttentionSpec(128, mask=causal(align="bottom_right"), forms=_CACHE),
    "window": AttentionSpec(
        64,
        "float16",
        mask=sliding_window(200, 0, align="bottom_right"),
        score=softcap(20.0),
        normaliser=softmax(sink=SINKS),
        forms=_CACHE,
    ),
    "wide": AttentionSpec((192, 128), mask=causal(align="bottom_right"), forms=_CACHE),
}
CALLS = (
    CacheCall((1, 700, 0, 5000), heads=8),
    CacheCall((4, 2000, 63, 1500), 4, heads=32, kv_heads=2, page_size=16, num_splits=7),
    CacheCall((1000, 17, 4100, 64), 1, heads=8, kv_heads=1, page_size=1),
    CacheCall((70, 300, 1500, 129), 70, page_size=64, num_splits=3),
    CacheCall((5, 700, 1290, 64), 2, slots=True, num_splits=64),
    CacheCall((100, 2000, 40, 900), (3, 0, 40, 1), page_size=256, padding=5),
)
#: As many queries as the Gluon kernel takes, for all SMs.
MANY = (
    CacheCall((700, 0, 1300, 2000), 700, heads=32, kv_heads=8),
    CacheCall((300, 5000, 400, 900), (300, 2000, 0, 500), heads=32, kv_heads=4, page_size=16),
    CacheCall((2100, 1500), 1500, heads=16, kv_heads=16, page_size=256),
)


@functools.cache
def _cache(name: str) -> ModuleType:
    return rendered_module(CACHES[name], hopper=True)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str, call: CacheCall) -> None:
    """Twice: the second call repeats a launch, with the counters that the first one left."""
    spec = CACHES[name]
    for _ in range(2):
        check_cached(_cache(name), spec, call, getattr(torch, spec.dtype), "cuda")


@pytest.mark.parametrize("call", MANY, ids=range(len(MANY)))
@pytest.mark.parametrize("name", ["causal", "wide"])
def test_many_queries(name: str, call: CacheCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper by the Gluon kernel, by launches that are repeated."""
    module = _cache(name)
    if module._is_hopper(torch.device("cuda", torch.cuda.current_device())):
        monkeypatch.setattr(module, "_launch_cache", None)
    for _ in range(2):
        check_cached(module, CACHES[name], call, torch.bfloat16, "cuda")


def test_a_graph_of_a_step_runs_beside_other_calls() -> None:
    module = _cache("causal")
    given = cached(CALLS[1], CACHES["causal"], torch.bfloat16, "cuda").arguments
    lens = given["kv_lens"]
    with torch.no_grad():
        module.cache_attention(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module.cache_attention(**given)
        other = torch.cuda.Stream()
        for new in ((4, 2000, 63, 1500), (2000, 4, 5, 6), (0, 0, 63, 4)):
            lens.copy_(torch.tensor(new, dtype=torch.int32))
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                beside = [module.cache_attention(**given) for _ in range(3)]
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            alone = module.cache_attention(**given)
            for x in (out, *beside):
                torch.testing.assert_close(x, alone, equal_nan=True, rtol=2e-2, atol=2e-2)


IDS = Tensor("ids", ("batch", "kv_len"), "int32")
GATE = Tensor("gate", ("num_q_heads", None), "bool")
#: Masks whose tiles are decided: for all heads alike, and for each.
DECIDED = {
    "ids": lambda b, h, q, kv: (kv <= q) & (IDS[b, q] == IDS[b, kv]),
    "gate": lambda b, h, q, kv: (kv <= q) & (GATE[h, kv // 64] | (q - kv < 9)),
}


def _kept(name: str, call: CacheCall, turn: int = 0) -> dict[str, torch.Tensor]:
    """What the mask reads: a few of the tiles are seen."""
    at, entry = torch.arange(call.capacity), torch.arange(len(call.kv_lens))[:, None]
    if name == "ids":
        return {"ids": ((at + 50 * (entry + turn)) // 150 % 5).int()}
    generator = torch.Generator().manual_seed(turn)
    return {"gate": torch.rand(call.heads, len(at) // 64 + 1, generator=generator) < 0.1}


@functools.cache
def _decided(name: str) -> tuple[AttentionSpec, ModuleType]:
    spec = AttentionSpec(128, mask=DECIDED[name], align="bottom_right", forms=_CACHE)
    return spec, rendered_module(spec)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("name", DECIDED)
def test_decided_tiles(name: str, call: CacheCall) -> None:
    """Twice: the second call repeats both launches."""
    spec, module = _decided(name)
    for turn in range(2):
        given = replace(call, params=_kept(name, call, turn))
        check_cached(module, spec, given, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", DECIDED)
def test_a_graph_decides_tiles_anew(name: str) -> None:
    """Each replay by the tensors as they are, and to the bit what a call is."""
    (spec, module), call = _decided(name), CALLS[0]
    call = replace(call, params=_kept(name, call))
    given = cached(call, spec, torch.bfloat16, "cuda").arguments
    with torch.no_grad():
        module.cache_attention(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module.cache_attention(**given)
        for turn in range(3):
            for key, x in _kept(name, call, turn).items():
                given[key].copy_(x)
            graph.replay()
            assert torch.equal(out, module.cache_attention(**given))


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_parts(count: int, dtype: torch.dtype) -> None:
    """Outputs and gradients of parts, also from repeated launches and in a graph."""
    module = rendered_module(VARLEN["causal_d128"])
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    for attempt in range(2):
        outs = [drawn(2, 70, 6, 128).to(dtype).transpose(1, 2) for _ in range(count)]
        lses = [(4 * drawn(2, 70, 6)).transpose(1, 2) for _ in range(count)]
        lses[0][:, :, 3:9] = -torch.inf
        parts = [x.requires_grad_() for x in (*outs, *lses)]
        wide = [x.detach().double().requires_grad_() for x in parts]
        got = module.merge(outs, lses)
        right = module._merge_in_torch(wide[:count], wide[count:], torch.float64)
        grads = [torch.randn_like(x) for x in got]
        found = torch.autograd.grad(got, parts, grads)
        exact = torch.autograd.grad(right, wide, [x.double() for x in grads])
        near = (
            {"rtol": 1e-2, "atol": 1e-2}
            if dtype == torch.bfloat16
            else {"rtol": 1e-4, "atol": 1e-4}
        )
        for mine, same in zip((*got, *found), (*right, *exact), strict=True):
            torch.testing.assert_close(mine.double(), same, **near, msg=f"call {attempt}")
    parts = [x.detach() for x in parts]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = module.merge(parts[:count], parts[count:])
    graph.replay()
    for mine, same in zip(replayed, got, strict=True):
        torch.testing.assert_close(mine, same, rtol=0, atol=0)
