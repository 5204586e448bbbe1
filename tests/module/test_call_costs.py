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
        monkeypatch.setattr(self.module, "_target", lambda device: "sm_90")
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

    def functions(self, call: Callable[[], Any]) -> Counter[str]:
        """The module's functions that a call calls, but for those that make tensor maps.

        Tensors are at other addresses than before, as they may be in a loop.
        """
        found: Counter[str] = Counter()
        file = self.module.__file__

        def note(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and frame.f_code.co_filename == file:
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
    "dense": ((1, 1, 11), (2, 1, 13), (4, 3, 20)),
    "split": ((1, 1, 11), (2, 1, 13), (4, 3, 19)),
    "varlen": ((2, 2, 18), (3, 2, 20), (4, 4, 25)),
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
        found = calls.functions(call)
        assert found.total() <= most, found


@pytest.mark.parametrize("name", SPECS)
def test_what_autograd_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that nobody asked for costs autograd time, and so does a gradient of zeros."""
    calls = Repeated(name, "equal", monkeypatch)
    out = calls.forward()
    assert out.grad_fn is not None
    assert len(out.grad_fn._input_metadata) == 1  # type: ignore[attr-defined]
