"""Gluon kernels of the backward pass on a GPU that notes: where they run, compiled once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from flashgen import AttentionSpec, identity, linear, sliding_window
from support.contract import native_inputs
from support.fake_gpu import fake_gpu, is_address, module_on
from support.turns import some
from support.watched_backward import (
    CASE,
    DIVIDED,
    KERNELS,
    LISTS,
    PORTABLE,
    SPECS,
    Watched,
    kernels_of,
    names_of,
)


def test_other_gpus_and_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("causal_d64", monkeypatch)
    monkeypatch.setattr(watched.module, "_is_hopper", lambda device: False)
    watched.call(CASE)
    assert watched.launched == {"_backward_rows", *PORTABLE}

    watched = Watched("causal_fp16_d128", monkeypatch)
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    monkeypatch.setattr(watched.module.triton, "knobs", knobs)
    assert not watched.module._runs_hopper_backward(*[torch.zeros(1, 1, 1, 128)] * 3)
    monkeypatch.undo()


def test_a_launch_has_four_warps_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first consumer's: Triton adds those of the other partitions."""
    watched = Watched("causal_d128", monkeypatch)
    options: list[object] = []
    kernel = watched.kernels["_backward_hopper"]
    launch = kernel._launch
    monkeypatch.setattr(
        kernel,
        "_launch",
        lambda *args, **given: (options.append(given.get("num_warps")), launch(*args, **given)),
    )
    watched.call(CASE)
    assert options == [4]


NAMED = (
    # Of sinks the launcher reads what a kernel has stored, in a repeated pass too.
    *("sinks_softmax_d64", "causal_d64", "documents_d128", "learns"),
    *("causal_d192_v128", "causal_d256", "deterministic", "dropout_causal_d64"),
    *("listed", "listed_twice"),
    *("slopes_d192", "t5_bias_causal"),
)

#: Of these what a call finds out for each kernel anew, as tables may have changed.
BEFORE = {
    ("documents_d128", "_backward_rows"): ("_find_rows",),
    ("listed", "_backward_hopper"): LISTS,
    ("listed_twice", "_backward_hopper"): LISTS,
    ("listed_twice", "_backward_queries_hopper"): LISTS[:1],
}

#: What adds up the gradients of a tensor's elements in a fixed order.
SUMS = ("_find_elements", "_sum_elements")
AFTER = {"slopes_d192": SUMS}


# Machine code takes seconds: a fast run has one.
COMPILED = some(NAMED, every=len(NAMED))


@pytest.mark.parametrize("name", COMPILED)
def test_it_is_compiled_once_and_launched_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Triton that is in Python runs, and ptxas; what it would launch is noted."""
    gpu = fake_gpu(monkeypatch)
    spec = SPECS[name]
    module = module_on(gpu, spec, monkeypatch)

    def gradients() -> list[tuple[object, ...]]:
        leaves = [x.clone().requires_grad_() for x in native_inputs(CASE, spec)]
        out = module.attention(*leaves, **CASE.arguments(spec))
        before = len(gpu.calls)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return gpu.calls[before:]

    def launched(calls: list[tuple[object, ...]]) -> list[str]:
        text = [repr(call) for call in calls]
        names = (*KERNELS, *DIVIDED[2:], *PORTABLE, *LISTS, "_sum_diagonals", "_sum_strips")
        names += ("_find_rows", *SUMS)
        return [next(k for k in names if k in call) for call in text]

    expected = [k for kernel in kernels_of(name) for k in (*BEFORE.get((name, kernel), ()), kernel)]
    expected += AFTER.get(name, ())
    first, second = gradients(), gradients()
    assert launched(first) == launched(second) == expected
    for kernel in kernels_of(name):
        caches = getattr(module, kernel).device_caches.values()
        assert sum(len(cache[0]) for cache in caches) == 1
    assert [len(call) for call in first] == [len(call) for call in second]
    if triton.__version__ >= "3.6":
        (kept,) = (set(x) for key, x in module._LAUNCHES.items() if key[0][:1] == ("backward",))
        names = names_of(spec)
        last = {"queries"} if names.both_in_gluon else {"sums"} if not names.split else set()
        assert kept == {"rows", "tiles", *last}


def _addresses(x: Any) -> set[int]:
    """All that a launch was given: tensors are at large numbers."""
    if isinstance(x, tuple):
        return set().union(*map(_addresses, x))
    return {x} if is_address(x) else set()


def test_a_repeated_pass_reads_a_gradient_that_was_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sums of weights, in memory of the pass's own."""
    gpu = fake_gpu(monkeypatch)
    spec = AttentionSpec(64, mask=sliding_window(20, 0), normaliser=linear(identity()))
    module = module_on(gpu, spec, monkeypatch)
    passes = []
    for _ in range(2):
        leaves = [torch.randn(1, 2, 128, 64).bfloat16().requires_grad_() for _ in "qkv"]
        out = module.attention(*leaves)
        before, given = len(gpu.calls), torch.ones_like(out)
        torch.autograd.grad(out, leaves, given)
        of_rows, of_tiles, _ = map(_addresses, gpu.calls[before:])
        assert given.data_ptr() in of_rows
        assert given.data_ptr() not in of_tiles
        passes.append((of_rows & of_tiles, given))  # rows, sums of dq, and what was divided
    assert [len(x) for x, _ in passes] == [3, 3]


@pytest.mark.parametrize("name", ["listed", "listed_twice"])
def test_a_repeated_launch_goes_by_lists_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, spec = fake_gpu(monkeypatch), SPECS[name]
    module = module_on(gpu, spec, monkeypatch)
    lists: list[torch.Tensor] = []  # which keeps them: no two have one address
    for made in ("_listed", "_transposed"):
        function = getattr(module, made)

        def noted(*args: Any, function: Any = function) -> torch.Tensor:
            lists.append(function(*args))
            return lists[-1]

        monkeypatch.setattr(module, made, noted)
    # Which list each kernel reads; the forward kernel's is the first.
    read = {"_backward_hopper": 2}
    if name == "listed_twice":
        read["_backward_queries_hopper"] = 3
    leaves = [x.clone().requires_grad_() for x in native_inputs(CASE, spec)]
    for _ in range(3):
        lists.clear()
        out = module.attention(*leaves, **CASE.arguments(spec))
        before = len(gpu.calls)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        for kernel, number in read.items():
            (call,) = (call for call in gpu.calls[before:] if kernel in repr(call))
            at = {x.data_ptr() for x in lists}
            assert _addresses(call) & at == {lists[number].data_ptr()}
