"""A module of linear attention besides its kernels' values: calls, derivatives, the operator."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import AttentionSpec, causal, elu_plus_one, full, identity, linear, relu
from support.recurrence import recurrence
from support.variants import rendered_module, shipped_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPECS = {
    "elu": AttentionSpec(16, "float32", mask=causal(), normaliser=linear(elu_plus_one())),
    "plain": AttentionSpec(
        (16, 24), "float32", mask=full(), normaliser=linear(identity(), normalise=False)
    ),
}


def drawn(
    heads: int = 2, kv_heads: int = 1, length: int = 70, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 16), (2, kv_heads, length, 16), (2, kv_heads, length, 16))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def test_the_reference_is_the_recurrence() -> None:
    for spec in (SPECS["elu"], AttentionSpec(16, "float32", normaliser=linear(relu()))):
        module = rendered_module(spec)
        tensors = drawn()
        out, lse = module.reference(*tensors, scale=0.3, return_lse=True)
        exact, sums = recurrence(spec, *tensors)
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(lse, torch.log(0.3 * sums))


@pytest.mark.parametrize("name", SPECS)
def test_derivatives_of_derivatives(name: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = [(1, 2, 3, 16), (1, 1, 3, 16), (1, 1, 3, spec.v_head_dim)]
    q, k, v = (torch.randn(x, requires_grad=True) for x in shapes)
    out = module.attention(q, k, v)
    [dq] = torch.autograd.grad(out.sum(), q, create_graph=True)
    mine = torch.autograd.grad((dq * dq).sum(), (q, k, v), materialize_grads=True)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    [dq] = torch.autograd.grad(recurrence(spec, *leaves)[0].sum(), leaves[0], create_graph=True)
    right = torch.autograd.grad((dq * dq).sum(), leaves, materialize_grads=True)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_the_transforms_of_torch_func() -> None:
    module, spec = rendered_module(SPECS["elu"]), SPECS["elu"]
    q, k, v = (x.float() for x in drawn(length=5))
    tangent = torch.ones_like(q)
    _, mine = torch.func.jvp(lambda x: module.attention(x, k, v), (q,), (tangent,))
    exact = tuple(x.double() for x in (q, k, v))
    _, right = torch.func.jvp(
        lambda x: recurrence(spec, x, *exact[1:])[0], exact[:1], (tangent.double(),)
    )
    torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_the_operator(name: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = [(1, 2, 5, 16), (1, 1, 5, 16), (1, 1, 5, spec.v_head_dim)]
    q, k, v = (torch.randn(x, requires_grad=True) for x in shapes)
    torch.library.opcheck(module.op, (q, k, v, *([] if spec.normaliser.normalise else [0.5])))
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    out, right = compiled(q, k, v), module.attention(q, k, v)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    grads = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, right))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_fake_tensors_have_the_shapes() -> None:
    module = shipped_module("linear_elu_d128")
    q, k = (torch.zeros(2, heads, 6, 128, dtype=torch.bfloat16) for heads in (4, 2))
    with FakeTensorMode() as mode:
        out, lse = module.attention(*map(mode.from_tensor, (q, k, k)), return_lse=True)
    assert (out.shape, out.dtype) == ((2, 4, 6, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)


def test_a_query_whose_weights_are_zero_is_zero() -> None:
    module = rendered_module(AttentionSpec(16, "float32", mask=causal(), normaliser=linear(relu())))
    q, k, v = (x.float().requires_grad_() for x in drawn(length=20))
    with torch.no_grad():
        q[:, :, 3] = -1.0
    out, lse = module.attention(q, k, v, return_lse=True)
    assert not out[:, :, 3].any() and (lse[:, :, 3] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads) and not grads[0][:, :, 3].any()


def test_empty_calls() -> None:
    module = rendered_module(SPECS["plain"])
    q, k, v = (torch.ones(1, 1, n, d) for n, d in ((3, 16), (0, 16), (0, 24)))
    assert not module.attention(q, k, v).any()
    assert module.attention(q[:, :, :0], q, v.new_ones(1, 1, 3, 24)).shape == (1, 1, 0, 24)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("elu", {"k": (2, 1, 8, 16), "v": (2, 1, 8, 16)}, "is for equal lengths only; pass as many "
         "keys as queries"),
        ("elu", {"q": (2, 2, 7, 8)}, "^q: "),
        ("elu", {"scale": 0.0}, "^scale: "),
        ("plain", {"return_lse": True}, "^return_lse: got True; the sum of weights may be"),
    ],
)  # fmt: skip
def test_what_a_call_refuses(name: str, change: dict, message: str) -> None:
    spec, module = SPECS[name], rendered_module(SPECS[name])
    shapes = {"q": (2, 2, 7, 16), "k": (2, 1, 7, 16), "v": (2, 1, 7, spec.v_head_dim)}
    given = {x: torch.zeros(y) if isinstance(y, tuple) else y for x, y in (shapes | change).items()}
    with pytest.raises((TypeError, ValueError), match=message):
        module.attention(**given)
