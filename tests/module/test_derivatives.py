"""Gradients of CPU tensors, which come from the reference: out's and the LSE's."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import pytest
import torch
from torch.autograd import forward_ad

from flashgen import AttentionSpec, Constant, Tensor, causal, softmax
from support.cases import Case
from support.contract import check_gradients, native_inputs
from support.oracle import error_and_bound
from support.variants import (
    rendered_module,
    shipped_module,
    shipped_module_anew,
    shipped_specs,
)
from support.variety import MASK_SPECS

SPECS = shipped_specs()
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.mark.parametrize("lse_only", [False, True], ids=["out and lse", "lse"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients(name: str, lse_only: bool) -> None:
    case = Case(21, 21, batch=2, q_heads=4, kv_heads=2)
    check_gradients(shipped_module(name), SPECS[name], case, lse_only=lse_only)


@pytest.mark.parametrize(
    "case",
    [
        Case(30, 11, q_heads=2, kv_heads=1, scale=0.2, params={"left": 4}),
        Case(11, 30, q_heads=2, kv_heads=1, params={"left": 4}),
        Case(5, 0),
        Case(0, 5),
        Case(4, 4, batch=0),
    ],
    ids=str,
)
def test_gradients_where_rows_see_nothing(case: Case) -> None:
    check_gradients(shipped_module("window_d128"), SPECS["window_d128"], case)


def test_gradients_of_a_mask_that_hides_everything() -> None:
    spec = MASK_SPECS["nothing"]
    check_gradients(rendered_module(spec), spec, Case(6, 7))


@pytest.mark.parametrize("needed", ["q", "k", "v"])
def test_a_gradient_of_one_argument(needed: str) -> None:
    module, spec = shipped_module("causal_d64"), SPECS["causal_d64"]
    tensors = dict(zip("qkv", native_inputs(Case(9, 9), spec), strict=True))
    every = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    right = torch.autograd.grad(module.attention(**every).float().sum(), every[needed])
    one = {**tensors, needed: tensors[needed].detach().clone().requires_grad_()}
    got = torch.autograd.grad(module.attention(**one).float().sum(), one[needed])
    torch.testing.assert_close(got, right)


def test_no_gradient_is_recorded_unless_asked_for() -> None:
    module = shipped_module("causal_d64")
    q, k, v = native_inputs(Case(9, 9), SPECS["causal_d64"])
    assert not module.attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not module.attention(q.requires_grad_(), k, v).requires_grad
    assert module.attention(q, k, v).requires_grad


def test_what_computes_them_is_said_once() -> None:
    module = shipped_module_anew("causal_d64")
    tensors = [x.requires_grad_() for x in native_inputs(Case(4, 4), SPECS["causal_d64"])]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            module.attention(*tensors).float().sum().backward()
    assert [str(warning.message) for warning in said] == [
        "causal_d64: tensors on cpu run the eager reference, by tiles of queries",
    ]


def test_gradients_of_gradients() -> None:
    """`create_graph=True` neither fails nor quietly leaves the second derivative out."""
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    tensors = native_inputs(Case(7, 7), spec)

    def penalty(attention, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.detach().to(dtype).clone().requires_grad_() for x in tensors)
        out, lse = attention(q, k, v, return_lse=True)
        (grad,) = torch.autograd.grad(out.square().sum() + lse.sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (q, k, v))

    right = penalty(module.reference, torch.float64)
    for got, exact, rough in zip(
        penalty(module.attention), right, penalty(module.reference), strict=True
    ):
        error, allowed = error_and_bound(got, exact, rough)
        assert error <= allowed


@pytest.mark.parametrize("made", ["the same", "of one another", "of what they are made of"])
def test_gradients_with_a_graph_of_inputs_that_depend_on_one_another(made: str) -> None:
    """As values that are a part of keys: `create_graph=True` counts no path twice."""
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    start = native_inputs(Case(7, 7), spec)[0]

    def gradients(create_graph: bool) -> tuple[torch.Tensor, ...]:
        x = start.clone().requires_grad_()
        q = x * 1.5 if made == "of what they are made of" else x
        k, v = (q, q) if made == "the same" else (q.flip(-1), 2 * q)
        loss = _loss(module, q, k, v)
        return torch.autograd.grad(loss, (x, q), create_graph=create_graph)

    for with_graph, plain in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(with_graph, plain)


def test_a_learned_tensor_in_two_places_and_a_graph() -> None:
    slopes, sinks = Tensor("slopes", ("num_q_heads",)), Tensor("sinks", ("num_q_heads",))
    score = lambda s, b, h, q, k: s + slopes[h] * (k - q)  # noqa: E731
    spec = AttentionSpec(16, "float32", causal(), score, normaliser=softmax(sink=sinks))
    module, learned = rendered_module(spec), torch.tensor([0.5, 0.25], requires_grad=True)
    out = module.attention(*(x[0][None] for x in _OF_FUNC), slopes=learned, sinks=learned)
    (plain,) = torch.autograd.grad(out.sum(), learned, retain_graph=True)
    (with_graph,) = torch.autograd.grad(out.sum(), learned, create_graph=True)
    torch.testing.assert_close(with_graph, plain)


def test_a_backward_pass_in_autocast() -> None:
    """Its reference computes in the module's own precision, as the forward pass did."""
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    tensors = [x.requires_grad_() for x in native_inputs(Case(40, 40), spec)]
    loss = _loss(module, *tensors)
    plain = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss, tensors)
    for one, other in zip(got, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["of constants", "beside keys that learn", "compiled"])
def test_forward_mode(how: str) -> None:
    """A tangent is carried through, not dropped."""
    module, spec = shipped_module("causal_fp32_d64"), SPECS["causal_fp32_d64"]
    q, k, v = native_inputs(Case(7, 7), spec)
    tangent = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    keys = k.clone().requires_grad_(how == "beside keys that learn")

    def derivative_of(q: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            out = module.attention(forward_ad.make_dual(q, tangent), keys, v)
            return forward_ad.unpack_dual(out).tangent

    torch._dynamo.reset()
    if how == "compiled":
        derivative_of = torch.compile(derivative_of, backend="eager", fullgraph=True)
    derivative = derivative_of(q, tangent).detach()
    step = 1e-6 * tangent.double()
    doubles = (k.double(), v.double())
    ends = [module.reference(q.double() + sign * step, *doubles) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(derivative.double(), slope, rtol=1e-3, atol=1e-4)


def _loss(module: ModuleType, *qkv: torch.Tensor) -> torch.Tensor:
    out, lse = module.attention(*qkv, return_lse=True)
    return out.square().sum() + lse.sum()


def _per_entry(module: ModuleType) -> tuple[torch.Tensor, ...]:
    """Gradients of each entry of the batch, one after another, in the shapes of transforms."""
    found = []
    for entry in zip(*_OF_FUNC, strict=True):
        leaves = [x[None].clone().requires_grad_() for x in entry]
        found.append(torch.autograd.grad(_loss(module, *leaves), leaves))
    return tuple(map(torch.stack, zip(*found, strict=True)))


_OF_FUNC = torch.randn(3, 2, 2, 9, 16, generator=torch.Generator().manual_seed(0)).unbind()


def test_transforms_of_torch_func() -> None:
    """vmap, grad, and each within the other: from the reference, which says so."""
    slopes = Constant("slopes", [0.5, 0.25], dims=("num_q_heads",))
    spec = AttentionSpec(
        16,
        "float32",
        causal(),
        lambda s, b, h, q, k: s + slopes[h] * (k - q),  # type: ignore[arg-type]
    )
    module = rendered_module(spec)
    batched = tuple(x[:, None] for x in _OF_FUNC)
    plain = torch.stack([module.attention(*x) for x in zip(*batched, strict=True)])
    with pytest.warns(UserWarning, match="under torch.func's transforms the eager reference runs"):
        torch.testing.assert_close(torch.func.vmap(module.attention)(*batched), plain)

    of_one = torch.func.grad(functools.partial(_loss, module), argnums=(0, 1, 2))
    for mine, right in zip(torch.func.vmap(of_one)(*batched), _per_entry(module), strict=True):
        torch.testing.assert_close(mine, right)
    of_all = torch.func.grad(
        lambda *x: torch.func.vmap(functools.partial(_loss, module))(*x).sum(), argnums=(0, 1, 2)
    )
    for mine, right in zip(of_all(*batched), _per_entry(module), strict=True):
        torch.testing.assert_close(mine, right)
    # What a transform made of the constant is gone with it.
    torch.testing.assert_close(module.attention(*(x[0] for x in batched)), plain[0])
