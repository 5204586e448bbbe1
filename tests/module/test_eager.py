"""Training in eager mode: calls of plain tensors pass the operators by, and nobody can tell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from support.cases import Case
from support.contract import native_inputs
from support.fake_gpu import FakeGpu, fake_gpu, module_on
from support.variants import shipped_module, shipped_specs

SPECS = shipped_specs()
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

#: Of each kind of arguments: none, a number, a tensor that learns, ids, a seed.
NAMES = (
    *("causal_fp32_d64", "window_d128", "sinks_softmax_d64"),
    *("documents_d128", "dropout_causal_d64"),
)
CASE = Case(12, 12, batch=2, q_heads=4, kv_heads=2)

Tensors = tuple[torch.Tensor, ...]


class Call:
    """A call of tensors that learn, by whichever way the module takes."""

    def __init__(self, name: str) -> None:
        self.module: ModuleType = shipped_module(name)
        self.spec = SPECS[name]
        self.tensors = [x.clone().requires_grad_() for x in native_inputs(CASE, self.spec)]
        self.params = CASE.arguments(self.spec)
        self.leaves = list(self.tensors)
        for key, x in self.params.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.params[key] = x.clone().requires_grad_()
                self.leaves.append(self.params[key])

    def __call__(self) -> Tensors:
        out, lse = self.module.attention(*self.tensors, return_lse=True, **self.params)
        return out, lse

    def gradients(self, *grads: torch.Tensor | None, **how: Any) -> list[torch.Tensor | None]:
        """Of all leaves, by those of the output and of the LSE."""
        pairs = [(x, grad) for x, grad in zip(self(), grads, strict=True) if grad is not None]
        outputs, given = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, self.leaves, given, allow_unused=True, **how))


def through_the_op(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_plain", lambda *tensors: False)


def past_the_op(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "op", None)
    monkeypatch.setattr(module, "op_backward", None)


def on_both_ways(name: str, run: Callable[[Call], Any]) -> tuple[Any, Any]:
    """What a call gives past the operators, and through them."""
    found = []
    for way in (past_the_op, through_the_op):
        with pytest.MonkeyPatch.context() as patch:
            way(shipped_module(name), patch)
            found.append(run(Call(name)))
    return found[0], found[1]


def assert_same(found: tuple[Any, Any]) -> None:
    torch.testing.assert_close(*found, rtol=0, atol=0)


def random_like(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)


@pytest.mark.parametrize("of", ["out", "lse", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits(name: str, of: str) -> None:
    def run(call: Call) -> list[torch.Tensor | None]:
        with torch.no_grad():
            out, lse = call()
        grad_out = None if of == "lse" else random_like(out, 1)
        return call.gradients(grad_out, None if of == "out" else random_like(lse, 2))

    assert_same(on_both_ways(name, run))


@pytest.mark.parametrize("name", NAMES)
def test_so_are_gradients_of_gradients(name: str) -> None:
    def run(call: Call) -> Tensors:
        out, lse = call()
        loss = out.float().square().sum() + lse.sum()
        grads = torch.autograd.grad(loss, call.leaves, create_graph=True)
        penalty = torch.stack([grad.float().square().sum() for grad in grads]).sum()
        return torch.autograd.grad(penalty, call.leaves)

    first, second = on_both_ways(name, run)
    assert any(grad.any() for grad in first)
    assert_same((first, second))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    def run(call: Call) -> list[torch.Tensor | None]:
        attention = partial(call.module.attention, **call.params)
        out = checkpoint(attention, *call.tensors, use_reentrant=reentrant)
        out.float().square().sum().backward()
        return [x.grad for x in call.leaves]

    found = on_both_ways("causal_fp32_d64", run)
    assert_same(found)
    call = Call("causal_fp32_d64")
    call()[0].square().sum().backward()
    assert_same((found[0], [x.grad for x in call.leaves]))


def test_hooks_of_saved_tensors_see_what_the_op_saves() -> None:
    def run(call: Call) -> tuple[list[torch.Tensor], Any]:
        packed: list[torch.Tensor] = []

        def pack(x: torch.Tensor) -> int:
            packed.append(x.detach().clone())
            return len(packed) - 1

        with saved_tensors_hooks(pack, lambda number: packed[number].clone()):
            out, _ = call()
        return packed, torch.autograd.grad(out.float().sum(), call.leaves, allow_unused=True)

    for name in NAMES:
        (saved, grads), through = on_both_ways(name, run)
        tensors = [x for x in Call(name).params.values() if isinstance(x, torch.Tensor)]
        assert len(saved) == 3 + len(tensors) + 2
        assert_same(((saved, grads), through))


@pytest.mark.parametrize("which", ["q", "k", "v", "out", "lse"])
def test_what_is_changed_in_place_is_noticed(which: str) -> None:
    call = Call("causal_fp32_d64")
    call.tensors = [2 * x for x in call.tensors]
    out, lse = call()
    loss = out.sum() + lse.sum()
    changed = dict(zip(("q", "k", "v", "out", "lse"), (*call.tensors, out, lse), strict=True))
    with torch.no_grad():
        changed[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_is_kept_for_as_long_as_it_is_asked_for() -> None:
    call = Call("causal_fp32_d64")
    out, _ = call()
    first = torch.autograd.grad(out.sum(), call.leaves, retain_graph=True)
    assert_same((first, torch.autograd.grad(out.sum(), call.leaves)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), call.leaves)


@pytest.mark.parametrize("after", ["a backward pass", "none"])
def test_no_tensor_is_held_for_too_long(after: str) -> None:
    """By what is saved, nor by a circle that only the collector would open."""
    call = Call("causal_fp32_d64")
    made = [2 * x for x in call.tensors]
    call.tensors, held = made, [weakref.ref(x) for x in made]
    gc.collect()
    gc.disable()
    try:
        out, lse = call()
        held += [weakref.ref(out), weakref.ref(lse)]
        loss = out.sum()
        if after == "a backward pass":
            loss.backward()  # which leaves the graph's nodes, without what they saved
        else:
            del loss
        call.tensors = []
        del made, out, lse
        assert [ref() for ref in held] == [None] * 5
    finally:
        gc.enable()


def test_a_gradient_that_nobody_made_is_zeros() -> None:
    """As of the op, whose gradients torch fills in: the leaves have gradients of 0, not None."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    def run(call: Call) -> Any:
        return torch.autograd.grad(Nothing.apply(call()[0]).sum(), call.leaves, allow_unused=True)

    assert_same(on_both_ways("causal_fp32_d64", run))


class _Seen(TorchDispatchMode):
    """Notes the operators that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that must not go past its op."""

    def apply(*args: Any) -> None:
        raise AssertionError("past the op")

    module = shipped_module("causal_d64")
    monkeypatch.setattr(module._Attention, "apply", apply)
    yield module


def test_what_watches_sees_the_op(refused: ModuleType) -> None:
    leaves = [x.requires_grad_() for x in native_inputs(CASE, SPECS["causal_d64"])]
    with pytest.raises(AssertionError, match="past the op"):
        refused.attention(*leaves)
    with _Seen() as seen:
        assert refused.attention(*leaves).requires_grad
    assert refused.op.name() in seen.names


def test_fake_meta_and_wrapped_tensors_see_the_op(refused: ModuleType) -> None:
    tensors = native_inputs(CASE, SPECS["causal_d64"])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x).requires_grad_() for x in tensors]
    for leaves in (
        fakes,
        [x.to("meta").requires_grad_() for x in tensors],
        [TwoTensor(x, x.clone()).requires_grad_() for x in tensors],
    ):
        out = refused.attention(*leaves)
        assert out.requires_grad and type(out) is type(leaves[0])


@pytest.mark.filterwarnings("ignore:.*boxed arguments")
def test_what_holds_other_values_than_its_memory_sees_the_op() -> None:
    """A kernel would read the memory: x where -x is meant, nothing of zeros without memory."""
    module = shipped_module("causal_fp32_d64")
    x = torch.randn(1, 2, 3, 64, requires_grad=True)
    with torch.inference_mode():
        assert module._is_plain(torch.randn(3))
    assert module._is_plain(x, x.detach(), x.mT, torch.nn.Parameter(x.detach()))
    assert not module._is_plain(x, torch._neg_view(x))
    assert not module._is_plain(torch._efficientzerotensor((3,)))

    class Batched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert not module._is_plain(grad)
            return grad

    given = torch.randn(4, *x.shape)
    [grads] = torch.autograd.grad(Batched.apply(x), x, given, is_grads_batched=True)
    assert torch.equal(grads, given)


def test_torch_compile_sees_the_op(refused: ModuleType) -> None:
    leaves = [x.requires_grad_() for x in native_inputs(CASE, SPECS["causal_d64"])]
    torch._dynamo.reset()
    backend = AotEagerAndRecordGraphs()
    out = torch.compile(refused.attention, fullgraph=True, backend=backend)(*leaves)
    out.float().sum().backward()
    name = refused.op.name().split("::")[1]
    assert name in backend.fw_graphs[0].code


def test_a_forward_pass_may_be_watched_and_the_backward_pass_not() -> None:
    call = Call("causal_fp32_d64")
    with _Seen():
        out, _ = call()
    assert_same((torch.autograd.grad(out.sum(), call.leaves), tuple(_plainly(call))))


def _plainly(call: Call) -> list[torch.Tensor | None]:
    out, _ = call()
    return list(torch.autograd.grad(out.sum(), call.leaves))


class OnGpu:
    """Training on a Hopper GPU made of the CPU, past the operators."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: FakeGpu = fake_gpu(monkeypatch)
        self.spec = SPECS[name]
        self.module = module_on(self.gpu, self.spec, monkeypatch)
        self.params = CASE.arguments(self.spec)

    def leaves(self, layout: str = "contiguous") -> list[torch.Tensor]:
        case = Case(12, 12, batch=2, q_heads=4, kv_heads=2, layout=layout)
        return [x.requires_grad_() for x in native_inputs(case, self.spec)]

    def backward(
        self, leaves: list[torch.Tensor], within: AbstractContextManager[Any], *, of_lse: bool
    ) -> list[str]:
        """What a pass launches, by its name and arguments; addresses are left out."""
        with within:
            out, lse = self.module.attention(*leaves, return_lse=True, **self.params)
        before = len(self.gpu.calls)
        outputs = (out, lse) if of_lse else (out,)
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        return [_without_addresses(call) for call in self.gpu.calls[before:]]


def _without_addresses(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_without_addresses, x))})"
    return "address" if isinstance(x, int) and x >= 2**22 else repr(x)


def test_a_pass_is_three_launches_and_makes_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where sums meet nor for a gradient of the LSE that nobody asked for."""
    on_gpu = OnGpu("causal_d64", monkeypatch)
    past_the_op(on_gpu.module, monkeypatch)
    leaves = on_gpu.leaves()
    launches = on_gpu.backward(leaves, nullcontext(), of_lse=False)
    assert len(launches) == 3
    out = on_gpu.module.attention(*leaves)
    grad = torch.ones_like(out)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, leaves, grad)
    made = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
    assert "aten::new_empty" in made
    assert not {name for name in made if "zero" in name or "fill" in name or "copy" in name}
    assert on_gpu.backward(leaves, nullcontext(), of_lse=False) == launches


def test_a_gradient_of_the_lse_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = OnGpu("causal_d64", monkeypatch)
    leaves = on_gpu.leaves()
    without, with_it = (
        on_gpu.backward(leaves, nullcontext(), of_lse=of_lse) for of_lse in (False, True)
    )
    assert without[0] != with_it[0] and without[1:] == with_it[1:]
    assert on_gpu.backward(leaves, nullcontext(), of_lse=False) == without
    assert on_gpu.backward(leaves, nullcontext(), of_lse=True) == with_it


def test_what_hooks_bring_back_is_read_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other strides than the forward pass had, as of tensors that were on the CPU meanwhile."""
    on_gpu = OnGpu("causal_d64", monkeypatch)
    hooks = partial(saved_tensors_hooks, lambda x: x, lambda x: x.contiguous())
    views, copies = on_gpu.leaves("transposed"), on_gpu.leaves()
    expected = on_gpu.backward(copies, nullcontext(), of_lse=False)
    for _ in range(2):
        assert on_gpu.backward(views, nullcontext(), of_lse=False) != expected
        assert on_gpu.backward(views, hooks(), of_lse=False) == expected


def test_deterministic_algorithms_after_a_launch_that_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = OnGpu("causal_d64", monkeypatch)
    leaves = on_gpu.leaves()
    assert "_backward_hopper" in str(on_gpu.backward(leaves, nullcontext(), of_lse=False))
    torch.use_deterministic_algorithms(True)
    try:
        launched = str(on_gpu.backward(leaves, nullcontext(), of_lse=False))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "_backward_hopper" not in launched and "_backward_of_queries" in launched
