"""Modules whose feature maps read whole vectors: derivatives, the operator, random matrices."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen import AttentionSpec, causal, favor, full, linear, softmax_features
from support.variants import rendered_module
from support.vector_maps import by_weights, digest_of

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

SPECS = {
    "softmax": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(softmax_features(), normalise=False)
    ),
    "favor": AttentionSpec((16, 24), "float32", mask=causal(), normaliser=linear(favor(32))),
    "favor_full": AttentionSpec(16, "float32", mask=full(), normaliser=linear(favor(32))),
    "sixteen_bits": AttentionSpec(64, normaliser=linear(favor())),
}


def drawn(name: str, length: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator, spec = torch.Generator().manual_seed(0), SPECS[name]
    shapes = ((1, 2, length, 16), (1, 1, length, 16), (1, 1, length, spec.v_head_dim))
    tensors = [torch.randn(x, generator=generator, dtype=dtype).requires_grad_() for x in shapes]
    more = [rendered_module(spec).draw_features(0).to(dtype)] if "favor" in name else []
    return tensors + more


@pytest.mark.parametrize("name", ["softmax", "favor", "favor_full"])
def test_the_reference_is_the_definition(name: str) -> None:
    tensors = drawn(name, 70, torch.float64)
    out = rendered_module(SPECS[name]).reference(*tensors, scale=0.3)
    torch.testing.assert_close(out, by_weights(SPECS[name], *tensors, scale=0.3))


@pytest.mark.parametrize("name", ["softmax", "favor"])
def test_derivatives_of_derivatives(name: str) -> None:
    spec, tensors = SPECS[name], drawn(name)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    found = []
    for run, (q, k, v, *rest) in (
        (rendered_module(spec).attention, tensors),
        (lambda *x: by_weights(spec, *x), exact),
    ):
        [dq] = torch.autograd.grad(run(q, k, v, *rest).sum(), q, create_graph=True)
        found.append(torch.autograd.grad((dq * dq).sum(), (q, k, v), materialize_grads=True))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "favor"])
def test_the_operator(name: str) -> None:
    module, tensors = rendered_module(SPECS[name]), drawn(name)
    first = (None, None, None, False) if name == "favor" else (None, False)
    # Sums of random features are of about 2**56.
    near = {"rtol": 1e-3, "atol": 2.0**40} if name == "favor" else {}
    torch.library.opcheck(module.op, (*tensors, 0.5, *first), **near)
    torch._dynamo.reset()
    compiled = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    out, right = compiled(*tensors), module.attention(*tensors)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
    grads = (torch.autograd.grad(x.sum(), tensors[:3]) for x in (out, right))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_the_transforms_of_torch_func() -> None:
    spec, (q, k, v, matrix) = SPECS["favor"], drawn("favor")
    q, k, v = (x.detach() for x in (q, k, v))
    attention = rendered_module(spec).attention
    _, mine = torch.func.jvp(lambda x: attention(q, x, v, matrix), (k,), (torch.ones_like(k),))
    exact = [x.double() for x in (q, k, v, matrix)]
    _, right = torch.func.jvp(
        lambda x: by_weights(spec, exact[0], x, *exact[2:]),
        (exact[1],),
        (torch.ones_like(exact[1]),),
    )
    torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


def test_empty_calls() -> None:
    module, matrix = rendered_module(SPECS["favor_full"]), drawn("favor_full")[3]
    q, k = torch.ones(1, 1, 3, 16), torch.ones(1, 1, 0, 16)
    assert not module.attention(q, k, k, matrix).any()
    assert module.attention(k, q, q, matrix).shape == (1, 1, 0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix": torch.zeros(16, 32)}, r"^matrix: got shape \(16, 32\); pass \(32, 16\)"),
        ({"matrix": torch.zeros(32, 16).double()}, "^matrix: got torch.float64; pass torch.float3"),
        ({"matrix": torch.zeros(16, 32).mT}, "^matrix: its rows are not contiguous; pass matrix"),
        ({"matrix": torch.zeros(32, 16, requires_grad=True)}, "^matrix: requires a gradient, which "
         "it does not get; pass matrix.detach"),
        ({"return_lse": True}, "^return_lse: got True; features are divided by their largest"),
        ({"scale": 0.0}, "^scale: "),
        ({"initial_state": (None, None)}, "^initial_state: got tuple; pass a triple of tensors"),
    ],
)  # fmt: skip
def test_what_a_call_refuses(change: dict, message: str) -> None:
    names = ("q", "k", "v", "matrix")
    given = dict(zip(names, drawn("favor"), strict=True)) | change
    with pytest.raises((TypeError, ValueError), match=message):
        rendered_module(SPECS["favor"]).attention(**given)


def test_a_seed_draws_the_same_bits_everywhere() -> None:
    """Digests of another machine, an H100's host among them: they must not change."""
    assert digest_of(rendered_module(SPECS["sixteen_bits"]).draw_features(5)) == "b91b7e8c5302928d"
    draw = rendered_module(SPECS["favor"]).draw_features
    assert digest_of(draw(2**64 - 1)) == "3de00f027a6c713f"
    with torch.device("meta"):
        assert draw(3, device="cpu").equal(draw(3, "cpu"))
    assert not draw(3).equal(draw(4)) and not draw(3).equal(draw(3 + 2**32))


class _Products(TorchDispatchMode):
    """Fails at a product of whole numbers that wraps around, which compiled C++ must not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor and result.dtype == torch.int64:
            numbers = [torch.as_tensor(x).double() for x in args]
            assert (numbers[0] * numbers[1]).abs().max() < 2.0**63
            self.seen = True
        return result


def test_random_words_do_not_overflow() -> None:
    module = rendered_module(SPECS["favor"])
    with _Products() as products:
        module._random_words(64, 2**64 - 1)
    assert products.seen


def test_drawn_rows_are_normal_and_orthogonal() -> None:
    spec = AttentionSpec(64, "float32", normaliser=linear(favor()))
    rows = rendered_module(spec).draw_features(0).double()
    products = rows[:64] @ rows[:64].mT
    lengths = products.diagonal().clone()
    assert (products - torch.diag(lengths)).abs().max() < 1e-4
    assert 0.9 < (rows[:64] @ rows[64:128].mT).std() / 8.0 < 1.1  # of blocks, it is not
    # Squared lengths are chi-squared of 64 degrees of freedom: of deviation 11.3.
    assert abs(rows.square().sum(-1).mean() - 64.0) < 3 * 11.3 / 16
    assert 9.0 < rows.square().sum(-1).std() < 14.0
    assert abs(rows.mean()) < 3 / 128 and abs(rows.pow(4).mean() - 3.0) < 0.2


def test_more_features_are_nearer_to_softmax() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 64, 16, generator=generator) * x for x in (0.5, 0.5, 1.0))
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    errors = []
    for features in (16, 128):
        spec = AttentionSpec(16, "float32", mask=causal(), normaliser=linear(favor(features)))
        module = rendered_module(spec)
        outs = [module.reference(q, k, v, module.draw_features(seed)) for seed in range(8)]
        errors.append(torch.stack([(x - softmax).square().mean() for x in outs]).mean().sqrt())
    # Errors fall with the root of the number: by 2.8.
    assert 2.0 < errors[0] / errors[1] < 4.0
