"""A call like one shortly before finds its launch by torch's own test of tensors: `_again`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashgen import AttentionSpec, causal
from support.fake_gpu import fake_gpu, module_on
from support.packed import offsets

BOTH = AttentionSpec(64, mask=causal(align="bottom_right"), forms=("dense", "varlen", "cache"))


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class Calls:
    """Calls of one module on a GPU that notes alone.

    Attributes:
        found: for each call whether `_again` found a launch.
        looked_at: how many calls had their tensors looked at by `_is_plain`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, BOTH, monkeypatch)
        self.found: list[bool] = []
        again = self.module._again

        def noted(*args: Any) -> Any:
            result = again(*args)
            self.found.append(result is not None)
            return result

        monkeypatch.setattr(self.module, "_again", noted)

    def found_by(self, call: Callable[[], Any]) -> bool:
        """Whether a call finds a launch so."""
        self.found.clear()
        call()
        return self.found[0]

    def dense(self, **changes: torch.Tensor) -> Callable[[], Any]:
        given = {name: tensor(1, 2, 50, 64) for name in "qkv"} | changes
        return lambda: self.module.attention(**given)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_the_third_call_finds_it(calls: Calls) -> None:
    # The first launches, the second finds the launch by its key.
    assert [calls.found_by(calls.dense()) for _ in range(4)] == [False, False, True, True]


def test_calls_of_two_kinds_in_turns(calls: Calls) -> None:
    both = calls.dense(), calls.dense(k=tensor(1, 2, 90, 64), v=tensor(1, 2, 90, 64))
    for call in both * 2:
        call()
    assert [calls.found_by(call) for call in both * 2] == [True] * 4
    noted = calls.gpu.calls[-4:]
    assert noted[0] != noted[1]


CHANGES: dict[str, Callable[[], torch.Tensor]] = {
    "more keys": lambda: tensor(1, 2, 51, 64),
    "other strides": lambda: tensor(1, 50, 2, 64).transpose(1, 2),
    "a parameter": lambda: torch.nn.Parameter(tensor(1, 2, 50, 64), requires_grad=False),
    "a gradient": lambda: tensor(1, 2, 50, 64).requires_grad_(),
    "negated": lambda: torch._neg_view(tensor(1, 2, 50, 64)),
    "no memory": lambda: torch._efficientzerotensor((1, 2, 50, 64), dtype=torch.bfloat16),
    "not aligned": lambda: tensor(6401)[1:].view(1, 2, 50, 64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_do_not(change: str, calls: Calls) -> None:
    for _ in range(3):
        calls.dense()()
    k = CHANGES[change]()
    v = tensor(1, 2, 51, 64) if change == "more keys" else tensor(1, 2, 50, 64)
    assert not calls.found_by(calls.dense(k=k, v=v))
    assert calls.found_by(calls.dense())


def test_what_is_refused_stays_refused(calls: Calls) -> None:
    for _ in range(3):
        calls.dense()()
    for k, message in (
        (tensor(1, 2, 50, 64).half(), "got torch.float16"),
        ([1.0], "got list"),
        (None, "got NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^k: {message}"):
            calls.dense(k=k)()  # type: ignore[arg-type]


def test_modes_do_not(calls: Calls) -> None:
    call = calls.dense()
    for _ in range(3):
        call()
    with FlopCounterMode(display=False):
        assert not calls.found_by(call)
    with torch.inference_mode():
        assert not calls.found_by(call)
    inside = []

    def under_vmap(x: torch.Tensor) -> torch.Tensor:
        inside.append(calls.module._again("dense", tuple(tensor(1, 2, 50, 64) for _ in "qkv")))
        return x

    torch.vmap(under_vmap)(torch.zeros(2))
    torch.func.grad(under_vmap)(torch.zeros(()))
    torch.jit.trace(under_vmap, torch.zeros(2), check_trace=False)
    assert inside == [None] * 3
    assert calls.found_by(call)


def test_a_tensor_that_is_given_twice(calls: Calls) -> None:
    x = tensor(1, 2, 50, 64)
    call = calls.dense(q=x, k=x, v=x)
    assert [calls.found_by(call) for _ in range(3)] == [False, False, True]
    # Equal ones that are not the same are like it, but not the other way round.
    assert calls.found_by(calls.dense())
    other = tensor(1, 2, 50, 64).float()
    with pytest.raises(TypeError, match=r"^v: got"):
        calls.dense(q=x, k=x, v=other)()


def test_what_is_no_tensor_has_to_be_the_same(calls: Calls) -> None:
    """Which tensors are given, numbers, and options that choose another kernel."""
    q, cache = tensor(3, 1, 4, 64), tensor(3, 32, 2, 64)
    lens, other = (torch.ones(3, dtype=torch.int32) for _ in range(2))

    def cached(**changes: Any) -> Callable[[], Any]:
        return lambda: calls.module.cache_attention(q, cache, cache.clone(), lens, **changes)

    with torch.no_grad():
        for _ in range(3):
            cached()()
        assert calls.found_by(cached())
        for changes in ({"num_splits": 2}, {"return_lse": True}, {"cache_slots": other}):
            assert not calls.found_by(cached(**changes))
            assert calls.found_by(cached())
        ends, packed = offsets((20, 30)), [tensor(50, 2, 64) for _ in range(3)]
        for _ in range(3):
            calls.module.varlen_attention(*packed, ends, ends, 30, 30)
        attend = calls.module.varlen_attention
        other = ends.clone()
        assert not calls.found_by(lambda: attend(*packed, ends, other, 30, 30))
        assert calls.found_by(lambda: attend(*packed, ends, ends, 30, 30))


def test_a_profiler_sees_launches(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        calls.dense()()
    monkeypatch.setattr(calls.module, "_is_watched", lambda: True)
    assert not calls.found_by(calls.dense())


@pytest.mark.parametrize("slip", ["absent", "tells nothing"])
def test_a_torch_without_the_test(slip: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = torch._C._dynamo.guards
    if slip == "absent":
        monkeypatch.delattr(guards, "TensorGuards")
    else:

        class Blind:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.check = lambda *tensors: True

        monkeypatch.setattr(guards, "TensorGuards", Blind)
    with pytest.warns(UserWarning, match="it is not known how torch .* compares"):
        for _ in range(3):
            calls.dense()()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not calls.found_by(calls.dense())
