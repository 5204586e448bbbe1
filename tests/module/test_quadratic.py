"""A module of linear attention over all pairs besides its kernels' values."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    causal,
    document,
    elu_plus_one,
    favor,
    identity,
    linear,
    sliding_window,
)
from support.over_pairs import PairCall, check_pairs
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
WINDOW = AttentionSpec(
    16, "float32", mask=sliding_window(9, 0), normaliser=linear(elu_plus_one(), decay=DECAY)
)
PLAIN = AttentionSpec(
    (16, 24), mask=sliding_window(9, 0), normaliser=linear(identity(), normalise=False)
)
SIGNED = AttentionSpec(16, "float32", mask=document(), normaliser=linear(identity()))
RANDOM = AttentionSpec(16, "float32", mask=document(), normaliser=linear(favor(32)))
HEADS = AttentionSpec(
    16, "float32", mask=causal(), normaliser=linear(
        elu_plus_one(), decay=lambda h: 0.5 * h - 0.25, algorithm="quadratic"
    )
)  # fmt: skip


def drawn(dtype: torch.dtype = torch.float32, v_dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 16), (2, 16), (2, v_dim))
    return tuple(torch.randn(2, h, 30, d, generator=generator).to(dtype) for h, d in sizes)


@pytest.mark.parametrize("spec", [WINDOW, RANDOM])
def test_cpu_tensors_have_what_the_kernels_compute(spec: AttentionSpec) -> None:
    check_pairs(rendered_module(spec), spec, PairCall(40, 40, steep=True, hidden=spec is RANDOM))


def test_derivatives_of_any_kind() -> None:
    module = rendered_module(WINDOW)
    sys.modules[module.__name__] = module  # where torch.compile looks for it
    tensors = [*drawn(), -torch.rand(2, 2, 30)]
    leaves = [x.requires_grad_() for x in tensors]

    def by(run: Any) -> Any:
        return lambda q, k, v, decay: run(q, k, v, decay=decay, return_lse=True)[0].square().sum()

    mine, right = by(module.attention), by(module.reference)

    def twice(run: Any) -> tuple[torch.Tensor, ...]:
        grads = torch.autograd.grad(run(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)

    firsts = torch.autograd.grad(right(*leaves), leaves)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    pairs = [
        *zip(twice(mine), twice(right), strict=True),
        *zip(torch.autograd.grad(compiled(*leaves), leaves), firsts, strict=True),
        *zip(torch.func.grad(mine, (0, 1, 2, 3))(*tensors), firsts, strict=True),
    ]
    assert all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs)
    ones = tuple(map(torch.ones_like, tensors))
    along = sum((x * y).sum() for x, y in zip(firsts, ones, strict=True))
    assert torch.allclose(torch.func.jvp(mine, tuple(tensors), ones)[1], along, rtol=1e-3)


def test_the_scale_is_the_logarithms_alone() -> None:
    module, (q, k, v) = rendered_module(WINDOW), drawn()
    decay = torch.zeros(2, 2, 30)
    one, other = (
        module.attention(q, k, v, decay=decay, scale=scale, return_lse=True) for scale in (1.0, 3.0)
    )
    assert torch.equal(one[0], other[0])
    assert torch.allclose(other[1] - one[1], torch.full_like(one[1], math.log(3.0)), atol=1e-5)


def test_calls_without_keys_and_on_no_device() -> None:
    module, (q, k, v) = rendered_module(PLAIN), drawn(torch.bfloat16, 24)
    out = module.attention(q[:, :, :0], k[:, :, :0], v[:, :, :0])
    assert out.shape == (2, 4, 0, 24)
    meta = module.attention(*(x.to("meta") for x in (q, k, v)))
    assert (meta.shape, meta.dtype, meta.is_meta) == ((2, 4, 30, 24), torch.bfloat16, True)


@pytest.mark.parametrize(
    ("spec", "changed", "message"),
    [
        (PLAIN, {"return_lse": True}, "return_lse: got True; weights are not divided by their sum"),
        (SIGNED, {"return_lse": True}, "return_lse: got True; the sum of weights may be negative"),
        (RANDOM, {"return_lse": True}, "return_lse: got True; features are divided by their larg"),
        (WINDOW, {"decay": torch.zeros(2, 4, 30)}, r"decay: got shape \(2, 4, 30\); pass \(2, 2"),
        (WINDOW, {"decay": None}, "decay: got NoneType; pass a torch.Tensor"),
        (HEADS, {}, "k: got 2 heads, for which decay of rendered is above 0, or NaN"),
        (PLAIN, {"initial_state": None}, "unexpected keyword argument 'initial_state'"),
        (SIGNED, {"scale": -1.0}, "scale: got -1.0; pass a positive number"),
        (RANDOM, {"document_ids": torch.zeros(2, 9, dtype=torch.int32)}, r"document_ids: got shap"),
    ],
)
def test_what_calls_refuse(spec: AttentionSpec, changed: dict[str, Any], message: str) -> None:
    module = rendered_module(spec)
    q, k, v = drawn(torch.bfloat16, 24) if spec is PLAIN else drawn()
    given: dict[str, Any] = {} if spec is not WINDOW else {"decay": torch.zeros(2, 2, 30)}
    if spec in (SIGNED, RANDOM):
        given["document_ids"] = torch.zeros(2, 30, dtype=torch.int32)
    matrix = (module.draw_features(0, device="cpu"),) if spec is RANDOM else ()
    with pytest.raises((TypeError, ValueError), match=message):
        module.attention(q, k, v, *matrix, **(given | changed))


def test_a_growing_decay_is_found_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (q, k, v) = rendered_module(WINDOW), drawn()
    decay = torch.full((2, 2, 30), 0.1)
    module.attention(q, k, v, decay=decay)
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    with pytest.raises(ValueError, match="decay: holds numbers above 0, or NaN"):
        module.attention(q, k, v, decay=decay)


def test_q_of_another_width_is_named_by_its_own() -> None:
    module, (q, k, v) = rendered_module(WINDOW), drawn()
    with pytest.raises(ValueError, match="q: got head_dim 8; rendered was built for 16"):
        module.attention(q[..., :8], k, v, decay=torch.zeros(2, 2, 30))


def test_modules_have_no_states() -> None:
    assert not hasattr(rendered_module(PLAIN), "step") and not hasattr(
        rendered_module(PLAIN), "merge"
    )


def test_parameters_may_have_names_of_the_module() -> None:
    """Of variables, and of functions that other modules do not have."""
    names = ("phi_q", "attended", "another", "inverse")
    spans = [Int(name, 9, min=1) for name in names]

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < sum(spans))

    spec = AttentionSpec(16, "float32", mask=near, normaliser=linear(elu_plus_one()))
    module, (q, k, v) = rendered_module(spec), drawn()
    one = module.attention(q, k, v, **dict.fromkeys(names, 2))
    other = module.reference(q, k, v, phi_q=5, attended=1, another=1, inverse=1)
    assert torch.allclose(one, other, atol=1e-5)
