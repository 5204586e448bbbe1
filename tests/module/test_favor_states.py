"""States of random features: their exponent, from call to call and step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor, causal, document, favor, linear
from support.variants import rendered_module
from support.vector_maps import by_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
SPECS = {
    "plain": AttentionSpec((16, 24), "float32", mask=causal(), normaliser=linear(favor(32))),
    "decays": AttentionSpec(
        16, "float32", mask=causal(), normaliser=linear(favor(256), decay=DECAY)
    ),
    "documents": AttentionSpec(
        16, "float32", mask=document() & causal(), normaliser=linear(favor(32))
    ),
}


def drawn(name: str, grows: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k and v, whose later keys are longer, or shorter, by a factor."""
    generator = torch.Generator().manual_seed(0)
    widths = ((4, 16), (2, 16), (2, SPECS[name].v_head_dim))
    tensors = [torch.randn(1, h, 20, d, generator=generator, dtype=dtype) for h, d in widths]
    tensors[1][:, :, 13:] *= grows
    return tensors


def given(name: str, rows: slice, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    decay = -torch.rand(1, 2, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = (torch.arange(20)[None] // 11).int()
    if name == "decays":
        return {"decay": decay[:, :, rows]}
    return {"document_ids": ids[:, rows]} if name == "documents" else {}


@pytest.mark.parametrize("grows", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("name", SPECS)
def test_states_go_on_from_call_to_call_and_step_to_step(name: str, grows: float) -> None:
    module, tensors = rendered_module(SPECS[name]), drawn(name, grows)
    matrix = module.draw_features(0)

    def run(begin: int, end: int, state: Any) -> Any:
        part = [x[:, :, begin:end] for x in tensors]
        options = {"initial_state": state, "return_state": True}
        return module.attention(*part, matrix, **given(name, slice(begin, end)), **options)

    whole, last = run(0, 20, None)
    outs, state = [], None
    for begin, end in ((0, 13), (13, 17)):
        out, state = run(begin, end, state)
        outs.append(out)
    for n in range(17, 20):
        part = [x[:, :, n : n + 1] for x in tensors]
        options = given(name, slice(n, n + 1))
        options.pop("document_ids", None)
        out, state = module.step(*part, matrix, state, **options)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-4, atol=1e-5)
    for x, y in zip(state, last, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * y.abs().max().item())
    part = [x[:, :, :1] for x in tensors]
    options = given(name, slice(0, 1))
    options.pop("document_ids", None)
    first, state = module.step(*part, matrix, None, **options)
    torch.testing.assert_close(first, whole[:, :, :1], rtol=1e-4, atol=1e-5)


def test_a_state_is_the_sums_divided_by_a_power_of_2() -> None:
    q, k, v = drawn("plain", dtype=torch.float64)
    module = rendered_module(SPECS["plain"])
    matrix = module.draw_features(0).double()
    _, (kv, z, exponent) = module.reference(q, k, v, matrix, scale=0.5, return_state=True)
    x = k * 0.5**0.5
    phi = torch.exp(x @ matrix.mT - x.square().sum(-1, keepdim=True) / 2)
    factor = torch.exp2(exponent)[..., None]
    torch.testing.assert_close(z * factor, phi.sum(2))
    torch.testing.assert_close(kv * factor[..., None], phi.mT @ v)
    none = [x[:, :, :0] for x in (q, k, v)]
    _, (kv, z, exponent) = module.reference(*none, matrix, return_state=True)
    assert exponent.isfinite().all() and not kv.any() and not z.any()
    _, state = module.reference(q, k, v, matrix, scale=0.5, return_state=True)
    _, last = module.reference(
        q, k, v, matrix, scale=0.5, initial_state=(kv, z, exponent), return_state=True
    )
    torch.testing.assert_close(last, state, rtol=0, atol=0)


@pytest.mark.parametrize("grows", [0.1, 4.0])
@pytest.mark.parametrize("name", ["plain", "decays"])
def test_gradients_go_through_states(name: str, grows: float) -> None:
    spec, tensors = SPECS[name], [x.requires_grad_() for x in drawn(name, grows)]
    module = rendered_module(spec)
    matrix, parts, state = module.draw_features(0), [], None
    for rows in (slice(0, 9), slice(9, 13), slice(13, 20)):
        part = [x[:, :, rows] for x in tensors]
        out, state = module.attention(
            *part, matrix, **given(name, rows), initial_state=state, return_state=True
        )
        parts.append(out)
    weights = torch.randn(1, 4, 20, 1, generator=torch.Generator().manual_seed(2))
    mine = torch.autograd.grad((torch.cat(parts, 2) * weights).sum(), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    options = given(name, slice(0, 20), torch.float64)
    out = by_weights(spec, *exact, matrix.double(), **options)
    right = torch.autograd.grad((out * weights).sum(), exact)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-5)


def test_the_operator() -> None:
    module = rendered_module(SPECS["plain"])
    tensors = [x.requires_grad_() for x in drawn("plain")]
    matrix = module.draw_features(0)
    _, state = module.attention(*tensors, matrix, return_state=True)
    kv, z, exponent = (x.detach() for x in state)
    given = (*tensors, matrix, 0.5, kv.requires_grad_(), z.requires_grad_(), exponent)
    for returns in (False, True):  # sums and states are of about 2**56
        torch.library.opcheck(module.op, (*given, returns), rtol=1e-3, atol=2.0**40)
    stepped = [x.detach()[:, :, :1] for x in tensors]
    args = (*stepped, matrix, 0.5, kv.detach(), z.detach(), exponent)
    torch.library.opcheck(module.op_step, args, test_utils=("test_schema", "test_faketensor"))
    run = torch.compile(module.attention, fullgraph=True, backend="aot_eager")
    options = {"initial_state": (kv, z, exponent), "return_state": True}
    found = run(*tensors, matrix, **options), module.attention(*tensors, matrix, **options)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    grads = (torch.autograd.grad(x[0].sum() + x[1][0].sum(), (*tensors, kv)) for x in found)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((torch.zeros(1, 2, 32, 24),) * 2, "^initial_state: got tuple; pass a triple of tensors"),
        (
            (torch.zeros(1, 2, 32, 24), torch.zeros(1, 2, 32), torch.zeros(1, 2, 1)),
            r"^initial_state\[2\]: got shape \(1, 2, 1\); pass \(1, 2\)",
        ),
    ],
)
def test_what_is_no_state(state: Any, message: str) -> None:
    module = rendered_module(SPECS["plain"])
    with pytest.raises((TypeError, ValueError), match=message):
        module.attention(*drawn("plain"), module.draw_features(0), initial_state=state)
