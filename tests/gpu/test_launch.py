"""Launches that are repeated, on the GPU, beside ordinary ones of another module."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.knobs import HookChain

from gpu.launch import module_of, native, poison
from support.cases import Case, inputs
from support.variants import shipped_specs

pytestmark = pytest.mark.gpu

SPECS = shipped_specs()
NAMES = (
    "causal_d128",
    "full_d64",
    "window_d128",
    "documents_d128",
    "sinks_softmax_d64",
    "softcap_d128",
    "causal_d192_v128",
    "dropout_causal_d64",
)
CASE = Case(300, 300, batch=2, q_heads=4, kv_heads=2)

Tensors = tuple[torch.Tensor, ...]


class Pair:
    """A module, whose launches are repeated, and another one, whose launches never are."""

    def __init__(self, name: str, form: str) -> None:
        self.spec = SPECS[name]
        self.module: ModuleType = module_of.__wrapped__(name, form)
        self.other: ModuleType = module_of.__wrapped__(name, form)
        self.other.__dict__["_known"] = lambda *_: (None, None)

    def call(self, case: Case = CASE) -> tuple[Tensors, dict[str, Any]]:
        """Tensors at addresses of their own, and parameters."""
        return inputs(case, self.spec, native(self.spec), "cuda"), case.arguments(self.spec, "cuda")

    def check(self, tensors: Tensors, params: dict[str, Any], **keywords: Any) -> None:
        """Both give the same bits."""
        expected = self.other.attention(*tensors, return_lse=True, **params, **keywords)
        poison()
        got = self.module.attention(*tensors, return_lse=True, **params, **keywords)
        assert all(map(torch.equal, got, expected))

    def repeats(self, tensors: Tensors, params: dict[str, Any]) -> bool:
        """Whether a call of these would be repeated from one that was kept."""
        tables = [x for x in params.values() if isinstance(x, torch.Tensor)]
        numbers = [params["dropout_p"]] if self.spec.dropout else []
        return self.module._known(*tensors, *tables, *numbers)[1] is not None


@pytest.mark.parametrize("name", NAMES)
def test_other_addresses(name: str, form: str) -> None:
    pair = Pair(name, form)
    calls = [pair.call() for _ in range(3)]
    for tensors, _ in calls[1:]:
        for x in tensors:
            x.copy_(torch.randn_like(x))
    pair.check(*calls[0])
    for call in (*calls, *calls):
        assert pair.repeats(*call)
        pair.check(*call)


@pytest.mark.parametrize("name", NAMES)
def test_after_another_shape_and_back(name: str, form: str) -> None:
    pair = Pair(name, form)
    lengths = (300, 128, 300, 17, 128, 300)
    for length in lengths:
        pair.check(*pair.call(Case(length, length, batch=2, q_heads=4, kv_heads=2)))
    # Beside the kernel of each row's bounds, where there is one.
    calls = [key for key in pair.module._LAUNCHES if key[0] != "rows"]
    assert len(calls) == len(set(lengths))


@pytest.mark.parametrize("which", range(3))
def test_views_that_are_not_aligned(which: int, form: str) -> None:
    """By 2 bytes: the portable kernel's, whatever came before."""
    pair = Pair("causal_d128", form)
    tensors, params = pair.call()
    pair.check(tensors, params)
    memory = torch.empty(tensors[which].numel() + 1, dtype=native(pair.spec), device="cuda")
    view = memory[1:].view(tensors[which].shape).copy_(tensors[which])
    views = (*tensors[:which], view, *tensors[which + 1 :])
    for _ in range(2):
        pair.check(views, params)
        assert not pair.repeats(views, params)
        pair.check(tensors, params)


def test_other_strides(form: str) -> None:
    pair = Pair("causal_d128", form)
    for _ in range(2):
        for layout in ("contiguous", "transposed"):
            pair.check(*pair.call(Case(300, 300, 2, 4, 2, layout)))
    assert len(pair.module._LAUNCHES) == 2


@pytest.mark.parametrize("name", ["causal_d128", "window_d128", "documents_d128"])
def test_two_streams(name: str, form: str) -> None:
    pair = Pair(name, form)
    tensors, params = pair.call(Case(1500, 1500, batch=2, q_heads=6, kv_heads=2))
    expected = pair.other.attention(*tensors, **params)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(pair.module.attention(*tensors, **params))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_other_numbers(form: str) -> None:
    pair = Pair("window_d128", form)
    tensors, _ = pair.call()
    for left in (100, 1, 16, 0, 2**30):
        for scale in (None, 0.3, 1):
            pair.check(tensors, {"left": left}, scale=scale)
    assert len(pair.module._LAUNCHES) == 1


def test_more_addresses_than_are_remembered(form: str) -> None:
    pair = Pair("full_d64", form)
    tensors, _ = pair.call(Case(64, 64))
    many = [tuple(torch.randn_like(x) for x in tensors) for _ in range(200)]
    for _ in range(2):
        for each in many:
            pair.check(each, {})


def test_a_graph_of_a_repeated_launch(form: str) -> None:
    pair = Pair("causal_d128", form)
    tensors, params = pair.call()
    for _ in range(2):
        expected = pair.module.attention(*tensors)
    assert pair.repeats(tensors, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.module.attention(*tensors)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_hooks_are_called(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("causal_d128", form)
    tensors, params = pair.call()
    pair.check(tensors, params)
    told: list[str] = []
    hook: Any = HookChain()
    hook.add(lambda metadata: told.append(metadata.get()["name"]))
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    pair.module.attention(*tensors)
    assert told == ["_attention_hopper" if form == "hopper" else "_attention_forward"]


def test_several_threads(form: str) -> None:
    """Each on a stream of its own, from the first call of a shape on."""
    pair = Pair("causal_d128", form)
    calls = [pair.call(Case(n, n, batch=1, q_heads=4, kv_heads=4)) for n in (100, 200, 300)]
    expected = [pair.other.attention(*tensors) for tensors, _ in calls]
    torch.cuda.synchronize()
    wrong: list[int] = []
    done: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(60):
                at = (turn + number) % len(calls)
                out = pair.module.attention(*calls[at][0])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, expected[at]):
                    wrong.append(at)
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 and not wrong


def test_a_gpu_that_is_not_the_current_one(form: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pair = Pair("causal_d128", form)
    tensors, params = pair.call()
    there = tuple(x.to("cuda:1") for x in tensors)
    expected = pair.other.attention(*tensors)
    for _ in range(3):
        assert torch.equal(pair.module.attention(*tensors), expected)
        assert torch.equal(pair.module.attention(*there).to("cuda:0"), expected)
    assert pair.repeats(there, params)
