"""What a repeated call does on the CPU: operators, allocations, launches and calls of functions.

Counts do not vary as times do. A count that grows is time that every call takes from now on; the
times that belong to these counts are in docs/performance.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, causal
from support.fake_gpu import FakeGpu, fake_gpu, module_on
from support.packed import offsets

SPECS = {
    "dense": AttentionSpec(128, mask=causal()),
    "split": AttentionSpec(192, mask=causal(), deterministic=True),
    "varlen": AttentionSpec(128, mask=causal(), forms=("dense", "varlen")),
}
HEADS = {"equal": (2, 2), "grouped": (4, 1)}


class Repeated:
    """Calls of a module that earlier calls were like.

    Attributes:
        gpu: where launches are noted.
        module: the module.
        leaves: q, k and v, which require gradients.
    """

    def __init__(self, name: str, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.gpu: FakeGpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, SPECS[name], monkeypatch)
        dim = SPECS[name].qk_head_dim
        shapes = [(200, n, dim) if name == "varlen" else (2, n, 200, dim) for n in HEADS[heads]]
        shapes.append(shapes[1])
        self.leaves = [torch.zeros(x, dtype=torch.bfloat16).requires_grad_() for x in shapes]
        self.offsets = offsets((80, 120))
        for _ in range(2):
            self.gradients(self.forward(), self.grad_out())

    def forward(self) -> torch.Tensor:
        if self.name == "varlen":
            given = (*self.leaves, self.offsets, self.offsets, 120, 120)
            out: torch.Tensor = self.module.varlen_attention(*given)
        else:
            out = self.module.attention(*self.leaves)
        return out

    def gradients(self, out: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, grad_out)

    def grad_out(self) -> torch.Tensor:
        return torch.zeros(self.leaves[0].shape, dtype=torch.bfloat16)

    def launches(self, call: Callable[[], Any]) -> int:
        """How many kernels a call launches."""
        before = len(self.gpu.calls)
        call()
        return len(self.gpu.calls) - before


def functions(call: Callable[[], Any], module: ModuleType) -> Counter[str]:
    """The module's functions that a call calls, but for those that make tensor maps.

    Tensors are at other addresses than before, as they may be in a loop.
    """
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename == module.__file__:
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    for name in ("__missing__", "_filled", "<lambda>"):
        del found[name]
    return found


def operators(call: Callable[[], Any]) -> Counter[str]:
    """The operators of torch that a call runs, also those that others call."""
    with torch.autograd.profiler.profile() as profile:
        call()
    names = (event.name for event in profile.function_events)
    return Counter(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def only_allocations(number: int) -> Counter[str]:
    return Counter({"new_empty": number, "empty": number})


#: Allocations, launches, and calls of the module's functions at most: of a forward pass without
#: gradients, one with, and a backward pass.
COSTS = {
    "dense": ((1, 1, 10), (2, 1, 12), (4, 3, 18)),
    "split": ((1, 1, 10), (2, 1, 12), (4, 3, 17)),
    "varlen": ((2, 2, 14), (3, 2, 16), (4, 4, 20)),
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", SPECS)
def test_a_repeated_call(name: str, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Repeated(name, heads, monkeypatch)
    grad_out, outs = calls.grad_out(), [calls.forward() for _ in range(3)]
    passes: tuple[Callable[[], Any], ...] = (
        torch.no_grad()(calls.forward),
        calls.forward,
        lambda: calls.gradients(outs.pop(), grad_out),
    )
    for call, (allocations, launches, most) in zip(passes, COSTS[name], strict=True):
        assert operators(call) == only_allocations(allocations)
        assert calls.launches(call) == launches
        found = functions(call, calls.module)
        assert found.total() <= most, found


@torch.no_grad()
def test_a_repeated_step_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu(monkeypatch)
    spec = AttentionSpec(64, mask=causal(align="bottom_right"), forms=("dense", "cache"))
    module = module_on(gpu, spec, monkeypatch)
    counters = torch.zeros(256, dtype=torch.int32)
    monkeypatch.setattr(module, "_cache_counters", lambda device, programs: counters)
    q, new = torch.zeros(2, 1, 4, 64).bfloat16(), torch.zeros(2, 1, 2, 64).bfloat16()
    cache = torch.zeros(2, 32, 2, 64).bfloat16()
    lens, angles = torch.ones(2, dtype=torch.int32), torch.zeros(32, 32)
    appended = (new, new, cache, cache.clone(), lens, None, angles, angles)
    calls: dict[str, tuple[Callable[[], Any], Counter[str], int]] = {
        "attention": (
            lambda: module.cache_attention(q, cache, cache, lens),
            only_allocations(2),
            12,
        ),
        "keys": (lambda: module.append(*appended), Counter(), 10),
        "queries": (
            lambda: module.append(*appended, q=q),
            Counter({"empty_like": 1, "empty": 1}),
            10,
        ),
    }
    for name, (call, allocations, most) in calls.items():
        for _ in range(2):
            call()
        assert operators(call) == allocations, name
        before = len(gpu.calls)
        found = functions(call, module)
        assert len(gpu.calls) == before + 1, name
        assert found.total() <= most, (name, found)


@pytest.mark.parametrize("name", SPECS)
def test_what_autograd_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that nobody asked for costs autograd time, and so does a gradient of zeros."""
    calls = Repeated(name, "equal", monkeypatch)
    out = calls.forward()
    assert out.grad_fn is not None
    assert len(out.grad_fn._input_metadata) == 1  # type: ignore[attr-defined]
