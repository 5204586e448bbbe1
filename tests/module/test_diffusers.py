"""flashgen's backend in diffusers' registry, beside its own."""

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)

from flashgen.integrations.diffusers import NAME, register, unregister

BATCH, Q_LEN, KV_LEN = 2, 24, 40


@pytest.fixture(autouse=True, scope="module")
def registered(own_cache):
    yield register()
    unregister()


def qkv(q_len=Q_LEN, kv_len=KV_LEN):
    generator = torch.Generator().manual_seed(0)
    sizes = ((BATCH, n, 4, 16) for n in (q_len, kv_len, kv_len))
    return [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]


def keys(*runs):
    mask = torch.zeros(BATCH, KV_LEN, dtype=torch.bool)
    for row, (first, end) in zip(mask, runs, strict=True):
        row[first:end] = True
    return mask


SOME = torch.rand(BATCH, 1, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(1)) < 0.5


HOLE = torch.tensor([9])
MASKED = keys((0, 30), (4, KV_LEN))
CALLS = {
    "all": {},
    "scale": {"scale": 0.5},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": MASKED},
    "padding in four": {"attn_mask": MASKED[:, None, None]},
    "a hole": {"attn_mask": MASKED.index_fill(1, HOLE, False)},
    "bools": {"attn_mask": SOME},
    "bools for all": {"attn_mask": SOME[0, 0]},
    "floats": {"attn_mask": SOME[:1].float() * 3},
    "floats of padding": {"attn_mask": torch.where(MASKED, 0.0, float("-inf"))},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_what_the_native_backend_computes(options):
    results = []
    for backend in (AttentionBackendName.NATIVE, AttentionBackendName(NAME)):
        inputs = qkv()
        out = dispatch_attention_fn(*inputs, **options, backend=backend)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        results.append((out, *torch.autograd.grad(out, inputs, weights)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def flux():
    """A transformer of one block of each kind, with random weights, and what it takes."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    given = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(7, 3),
        "return_dict": False,
    }
    return model, given


def test_a_transformer(registered):
    model, given = flux()
    right = model(**given)[0]
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

        attention = registry._backends[registered]
        patch.setitem(registry._backends, registered, lambda **x: calls.append(1) or attention(**x))
        model.set_attention_backend(registered)
        mine = model(**given)[0]
        model.reset_attention_backend()
    assert len(calls) == 2
    assert right.std() > 0.1
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_a_transformer_in_one_graph(registered):
    model, given = flux()
    right = model(**given)[0]
    model.set_attention_backend(registered)
    torch._dynamo.reset()
    mine = torch.compile(model, fullgraph=True, backend="eager")(**given)[0]
    model.reset_attention_backend()
    torch._dynamo.reset()
    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_kwargs": {"return_lse": True}}, "return_lse: flashgen's backend has it not"),
        ({"attention_kwargs": {"window": 3}}, "window: flashgen's backend has it not"),
        ({"parallel_config": object()}, "_parallel_config: flashgen's backend has it not"),
        ({"attn_mask": SOME, "is_causal": True}, "is_causal: is given beside attn_mask"),
        ({"attn_mask": SOME[0]}, r"attn_mask: got \(1, 24, 40\)"),
        ({"attn_mask": SOME.int()}, "attention_mask: got torch.int32"),
    ],
)
def test_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message), attention_backend(NAME):
        dispatch_attention_fn(*qkv(), **options)


def test_heads_that_share_keys():
    q, k, v = qkv()
    with attention_backend(NAME):
        with pytest.raises(ValueError, match="pass enable_gqa=True"):
            dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2])
        mine = dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], enable_gqa=True)
    right = dispatch_attention_fn(q, k[:, :, :2], v[:, :, :2], enable_gqa=True)
    torch.testing.assert_close(mine, right)


def test_the_registry(monkeypatch):
    unregister()
    unregister()
    with pytest.raises(ValueError, match=NAME):
        AttentionBackendName(NAME)
    assert register() == register() == NAME
    assert AttentionBackendName(NAME) in AttentionBackendName
    monkeypatch.setattr(diffusers, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=r"diffusers 0\.99\.0: flashgen knows"):
        register()
