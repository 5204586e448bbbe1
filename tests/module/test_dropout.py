"""dropout_p and seed: what a call takes, what it draws, and what frameworks make of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flashgen import AttentionSpec, softmax
from flashgen.philox import kept, philox
from support.cases import Case
from support.contract import check_gradients, native_inputs
from support.fake_gpu import FakeGpu, fake_gpu, module_on
from support.variants import rendered_module, shipped_module, shipped_specs

NAME = "dropout_causal_d64"
SPEC = shipped_specs()[NAME]
MODULE: ModuleType = shipped_module(NAME)
FLOAT = AttentionSpec(16, "float32", SPEC.mask, dropout=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

CASE = Case(20, 20, batch=2, q_heads=4, kv_heads=2)
Q, K, V = native_inputs(CASE, SPEC)

Attention = Callable[..., torch.Tensor]


def _attention(**chosen: Any) -> torch.Tensor:
    out: torch.Tensor = MODULE.attention(Q, K, V, **chosen)
    return out


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)


def test_what_is_dropped_is_what_the_oracle_says() -> None:
    """Of equal weights of a window's keys, with values that are a row of the identity each."""
    length = 64
    q, k = (torch.zeros(1, heads, length, 64, dtype=torch.bfloat16) for heads in (4, 2))
    v = torch.eye(64, dtype=torch.bfloat16).expand(1, 2, 64, 64)
    out = MODULE.attention(q, k, v, dropout_p=0.25, seed=99)
    visible = torch.ones(length, length).tril().bool()
    assert torch.equal(out != 0, kept((1, 4, length, length), 0.25, 99) & visible)


def test_without_dropout_nothing_is_dropped_and_nothing_drawn() -> None:
    plain = rendered_module(replace(SPEC, dropout=False)).attention(Q, K, V)
    state = torch.get_rng_state()
    for chosen in ({}, {"dropout_p": 0.0}, {"dropout_p": 0, "seed": 3}):
        assert torch.equal(_attention(**chosen), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_is_an_int_or_a_tensor_of_one_element() -> None:
    first = _attention(dropout_p=0.5, seed=-7)
    for same in (torch.tensor([-7]), torch.tensor(-7), torch.tensor([[-7]])):
        assert torch.equal(_attention(dropout_p=0.5, seed=same), first)
    for other in (-8, 7, -7 + 2**32, 2**63 - 1, -(2**63)):
        assert _differ(_attention(dropout_p=0.5, seed=other), first)


def test_without_a_seed_one_is_drawn_by_torchs_generator() -> None:
    torch.manual_seed(5)
    first, second = _attention(dropout_p=0.5), _attention(dropout_p=0.5)
    assert _differ(first, second)
    torch.manual_seed(5)
    assert torch.equal(_attention(dropout_p=0.5), first)
    assert torch.equal(_attention(dropout_p=0.5), second)


def test_the_lse_is_that_of_all_weights() -> None:
    _, plain = MODULE.attention(Q, K, V, return_lse=True)
    _, lse = MODULE.attention(Q, K, V, return_lse=True, dropout_p=0.9, seed=0)
    assert torch.equal(lse, plain)


def test_the_mean_over_seeds_is_the_attention_without_dropout() -> None:
    module = rendered_module(FLOAT)
    q, k, v = native_inputs(Case(24, 24), FLOAT)
    outs = torch.stack([module.attention(q, k, v, dropout_p=0.3, seed=i) for i in range(400)])
    errors = (outs.mean(0) - module.attention(q, k, v)).abs()
    assert (errors <= 6 * outs.std(0) / 20 + 1e-6).all()


REFUSED = [
    ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0; pass a number from 0 to before 1"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1; pass a number from 0 to before 1"),
    (
        {"dropout_p": float("nan")},
        ValueError,
        "dropout_p: got nan; pass a number from 0 to before 1",
    ),
    ({"dropout_p": True}, TypeError, "dropout_p: got bool; pass an int or a float"),
    ({"dropout_p": None}, TypeError, "dropout_p: got NoneType; pass an int or a float"),
    (
        {"seed": 1.5},
        TypeError,
        "seed: got float; pass an int64 tensor of one element, an int, or None",
    ),
    (
        {"seed": False},
        TypeError,
        "seed: got bool; pass an int64 tensor of one element, an int, or None",
    ),
    ({"seed": 2**63}, ValueError, f"seed: got {2**63}; pass an int of 64 bits"),
    (
        {"seed": torch.tensor([1], dtype=torch.int32)},
        TypeError,
        "seed: got torch.int32; pass torch.int64",
    ),
    (
        {"seed": torch.tensor([1]).to_sparse()},
        TypeError,
        "seed: got a nested or sparse tensor; pass a dense one",
    ),
    ({"seed": torch.tensor([1, 2])}, ValueError, "seed: got shape (2,); pass (1,)"),
    (
        {"seed": torch.tensor([1], device="meta")},
        ValueError,
        "seed: is on meta, q on cpu; pass one device",
    ),
]


@pytest.mark.parametrize(("chosen", "error", "message"), REFUSED)
def test_what_is_refused(chosen: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        _attention(**{"dropout_p": 0.5, **chosen})


def test_other_modules_have_neither() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        shipped_module("causal_d64").attention(Q, K, V, dropout_p=0.1)


def test_a_tensor_that_is_none_is_still_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"^q: got list; pass a torch.Tensor$"):
        MODULE.attention([1], K, V, dropout_p=0.5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2, 0.8])
def test_gradients(dropout_p: float) -> None:
    check_gradients(MODULE, SPEC, replace(CASE, params={"dropout_p": dropout_p}))


def _leaves() -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in (Q, K, V)]


def _gradients(attention: Attention) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    leaves = _leaves()
    attention(*leaves).float().square().sum().backward()
    gradients = tuple(x.grad for x in leaves if x.grad is not None)
    assert len(gradients) == 3
    return gradients


def _drawing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = MODULE.attention(q, k, v, dropout_p=0.5)
    return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_seed_again(reentrant: bool) -> None:
    def checkpointed(*x: torch.Tensor) -> Any:
        return checkpoint(_drawing, *x, use_reentrant=reentrant)

    torch.testing.assert_close(_gradients(checkpointed), _gradients(_drawing), rtol=0, atol=0)


def test_compiled_code_draws_as_eager_code_does() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_drawing, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_gradients(compiled), _gradients(_drawing), rtol=0, atol=0)


@pytest.mark.full
def test_inductor_drops_in_gradients_what_it_drops_in_outputs() -> None:
    """Outputs are linear in v, and a product that overflows is C++ which may say anything."""
    torch._dynamo.reset()
    compiled = torch.compile(rendered_module(FLOAT).attention, fullgraph=True)
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    for seed in (3, -5, 2**31, 2**62 + 0xF7FA6953):
        out = compiled(q, k, v, dropout_p=0.5, seed=torch.tensor([seed]))
        gradient = torch.randn_like(out)
        (of_v,) = torch.autograd.grad(out, v, gradient)
        torch.testing.assert_close((out * gradient).sum(), (v * of_v).sum(), rtol=0, atol=1e-4)


class _Word(int):
    """A whole number whose results have to fit into int64, where a kernel's C++ must not wrap."""

    def __mul__(self, other: int) -> _Word:
        return _fitting(int(self) * other)

    def __add__(self, other: int) -> _Word:
        return _fitting(int(self) + other)

    def __lshift__(self, other: int) -> _Word:
        return _fitting(int(self) << other)

    def __rshift__(self, other: int) -> _Word:
        return _fitting(int(self) >> other)

    def __and__(self, other: int) -> _Word:
        return _fitting(int(self) & other)

    def __or__(self, other: int) -> _Word:
        return _fitting(int(self) | other)

    def __xor__(self, other: int) -> _Word:
        return _fitting(int(self) ^ other)


def _fitting(number: int) -> _Word:
    assert -(2**63) <= number < 2**63, "it wraps around"
    return _Word(number)


@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_random_words_do_not_overflow(word: int) -> None:
    words = MODULE._philox([_Word(word)] * 4, [_Word(word)] * 2)
    whole = torch.tensor([word])
    assert [int(x) for x in words] == [int(x) for x in philox([whole] * 4, [whole] * 2)]


def test_compiled_code_takes_seeds_without_recompiling() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(MODULE.attention, fullgraph=True, backend=counter)
    for seed in (torch.tensor([4]), torch.tensor([5]), torch.tensor([-6])):
        chosen = {"dropout_p": 0.5, "seed": seed}
        assert torch.equal(compiled(Q, K, V, **chosen), _attention(**chosen))
    assert counter.frame_count == 1
    for number in (4, 5, -6):
        chosen = {"dropout_p": 0.5, "seed": number}
        assert torch.equal(compiled(Q, K, V, **chosen), _attention(**chosen))
    assert counter.frame_count <= 3  # as a constant, then as a number


def test_vmap() -> None:
    """A seed for all, a seed each, or seeds that are drawn, which torch wants to be told of."""
    stacks = [torch.stack([x, x]) for x in (Q, K, V)]
    one, other = torch.tensor([4]), torch.tensor([5])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: Any) -> torch.Tensor:
        out: torch.Tensor = MODULE.attention(q, k, v, dropout_p=0.5, seed=seed)
        return out

    alike = torch.func.vmap(attention, in_dims=(0, 0, 0, None))(*stacks, one)
    assert torch.equal(alike[0], alike[1])
    assert torch.equal(alike[0], attention(Q, K, V, one))
    apart = torch.func.vmap(attention)(*stacks, torch.stack([one, other]))
    assert torch.equal(apart[1], attention(Q, K, V, other))
    drawn = torch.func.vmap(_drawing, randomness="different")(*stacks)
    assert _differ(drawn[0], drawn[1])
    without = torch.func.vmap(MODULE.attention)(*stacks)
    assert torch.equal(without[1], _attention())


def test_gradients_of_gradients_drop_the_same() -> None:
    module = rendered_module(FLOAT)
    tensors = native_inputs(Case(9, 9), FLOAT)

    def penalty(attention: Attention, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.to(dtype).clone().requires_grad_() for x in tensors)
        out = attention(q, k, v, dropout_p=0.4, seed=21)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (q, k, v))

    got = penalty(module.attention, torch.float32)
    right = penalty(module.reference, torch.float64)
    for mine, exact in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-3, atol=1e-4)


def test_forward_mode_drops_the_same() -> None:
    module = rendered_module(FLOAT)
    q, k, v = native_inputs(Case(9, 9), FLOAT)
    tangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, tangent)
        out = module.attention(q, k, dual, dropout_p=0.4, seed=21)
        derivative = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(derivative, module.attention(q, k, tangent, dropout_p=0.4, seed=21))


def test_autocast_leaves_the_attention_alone() -> None:
    module = rendered_module(FLOAT)
    tensors, chosen = native_inputs(CASE, FLOAT), {"dropout_p": 0.4, "seed": 2}
    plain = module.attention(*tensors, **chosen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.attention(*tensors, **chosen), plain)


def test_a_sink_without_keys() -> None:
    """What is left is the sink, whatever is dropped."""
    spec = replace(FLOAT, normaliser=softmax(sink=1.5))
    q, k, v = native_inputs(Case(4, 0), spec)
    out, lse = rendered_module(spec).attention(q, k, v, return_lse=True, dropout_p=0.5)
    assert not out.any() and torch.equal(lse, torch.full_like(lse, 1.5))


class _Launches:
    """A module on a GPU, and what its calls pass to Triton's C code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
        self.gpu: FakeGpu = fake_gpu(monkeypatch)
        self.module: ModuleType = module_on(self.gpu, SPEC, monkeypatch)
        if form == "portable":
            monkeypatch.setattr(self.module, "_runs_hopper", lambda q, k, v: False)
        self.kept: list[Any] = []  # outputs, so that each has an address of its own

    def of(self, **chosen: Any) -> tuple[Any, ...]:
        """The arguments of one launch."""
        before = len(self.gpu.calls)
        self.kept.append(self.module.attention(Q, K, V, **chosen))
        (call,) = self.gpu.calls[before:]
        return _flat(call)


@pytest.fixture(params=["hopper", "portable"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Launches:
    return _Launches(monkeypatch, request.param)


def _flat(x: Any) -> tuple[Any, ...]:
    return tuple(z for y in x for z in _flat(y)) if isinstance(x, tuple) else (x,)


def test_a_repeated_launch_brings_its_own_seed_and_probability(launches: _Launches) -> None:
    seeds = torch.tensor([11]), torch.tensor([12])
    launches.of(dropout_p=0.25, seed=seeds[0])
    for dropout_p, seed in ((0.25, seeds[0]), (0.25, seeds[1]), (0.75, seeds[0])):
        passed = launches.of(dropout_p=dropout_p, seed=seed)
        assert seed.data_ptr() in passed
        other = seeds[seed is seeds[0]]
        assert other.data_ptr() not in passed
        assert round(dropout_p * 2**16) in passed
        assert 1 / (1 - dropout_p) in passed
    assert launches.gpu.binds == 1, "Triton prepared a launch anew"


def test_repeated_gradients_bring_their_own_seed_and_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Gluon kernel of the backward pass gets what its forward pass was called with."""
    gpu = fake_gpu(monkeypatch)
    module = module_on(gpu, SPEC, monkeypatch)
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    seeds = torch.tensor([11]), torch.tensor([12])
    kept_alive = []
    for dropout_p, seed in ((0.25, 0), (0.25, 1), (0.75, 0), (0.0, 1), (0.25, 0)):
        out = module.attention(*leaves, dropout_p=dropout_p, seed=seeds[seed])
        before = len(gpu.calls)
        kept_alive.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
        (call,) = (x for x in gpu.calls[before:] if "_backward_hopper" in repr(x))
        passed = _flat(call)
        assert seeds[seed].data_ptr() in passed and seeds[1 - seed].data_ptr() not in passed
        assert round(dropout_p * 2**16) in passed and 1 / (1 - dropout_p) in passed
    kept = [launches for key, launches in module._LAUNCHES.items() if key[0][:1] == ("backward",)]
    kernels = {launches["tiles"].kernel for launches in kept}
    assert len(kept) == len(kernels) == 2, "one that drops, one that does not"


def test_the_kernel_without_dropout_is_another_one(launches: _Launches) -> None:
    """Compiled without random numbers; each is launched again for calls of its kind."""
    for _ in range(2):
        for dropout_p in (0.0, 0.1, 0.2, 0.9):
            launches.of(dropout_p=dropout_p)
    assert launches.gpu.binds == 2
    kernels = {launch.kernel for launch in launches.module._LAUNCHES.values()}
    assert len(kernels) == 2
    # A multiplier of Philox, in 64 bits or as an int32.
    multipliers = str(0xD2511F53), str(0xD2511F53 - 2**32)
    texts = [kernel.asm["ttgir"] for kernel in kernels]
    assert sorted(any(x in text for x in multipliers) for text in texts) == [False, True]


def test_seeds_that_lie_side_by_side(launches: _Launches) -> None:
    """Elements of one tensor, as of a model's layers: no kernel is compiled for an address."""
    seeds = torch.arange(4)
    for seed in seeds:
        assert seed.data_ptr() in launches.of(dropout_p=0.5, seed=seed)
    assert launches.gpu.binds == 1
