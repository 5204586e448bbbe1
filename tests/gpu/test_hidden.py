"""What hidden rows hold, on a GPU: NaN behind lengths and in padding touches nothing."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Mask, Tensor, causal, document
from support.variants import rendered_module

pytestmark = pytest.mark.gpu

_LENGTHS = Tensor("lengths", ("batch",), "int32")
_keys = Mask(lambda b, h, q_idx, kv_idx: kv_idx < _LENGTHS[b], "keys")
_both = causal() & Mask(
    lambda b, h, q_idx, kv_idx: (kv_idx < _LENGTHS[b]) & (q_idx < _LENGTHS[b]), "both"
)
SPECS = {
    "keys d64": AttentionSpec(64, "bfloat16", _keys),
    "both d128": AttentionSpec(128, "bfloat16", _both),
    "both d256": AttentionSpec(256, "float16", _both),
    "documents": AttentionSpec(128, "bfloat16", document() & causal()),
}
BATCH, HEADS, LENGTH = 3, 4, 2000
SHOWN = (1, 1333, 1999)


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True)


def _ids() -> torch.Tensor:
    """Documents of some 150 tokens, and padding behind so many."""
    ids = torch.arange(LENGTH, dtype=torch.int32)[None] // 150 + torch.zeros(BATCH, 1).int()
    return ids.masked_fill(torch.arange(LENGTH) >= torch.tensor(SHOWN)[:, None], -1)


def _call(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """(q, k, v and a gradient of the output, what the mask reads, rows that are shown)."""
    spec = SPECS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    shape, dtype = (BATCH, HEADS, LENGTH, spec.qk_head_dim), getattr(torch, spec.dtype)
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in range(4)
    ]
    lengths = torch.tensor(SHOWN, dtype=torch.int32, device="cuda")
    given = {"document_ids": _ids().cuda()} if name == "documents" else {"lengths": lengths}
    return (
        tensors,
        given,
        (torch.arange(LENGTH, device="cuda") < lengths[:, None])[:, None, :, None],
    )


def _dirty(name: str, tensors: list[torch.Tensor], shown: torch.Tensor) -> list[torch.Tensor]:
    """NaN in hidden rows; the mask of "keys" shows something to every query."""
    q, k, v, grad_out = (x.where(shown, torch.nan) for x in tensors)
    return [tensors[0], k, v, tensors[3]] if name == "keys d64" else [q, k, v, grad_out]


@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str) -> None:
    module, (tensors, given, shown) = _module(name), _call(name)
    clean, found = (
        module.attention(*x[:3], return_lse=True, **given)
        for x in (tensors, _dirty(name, tensors, shown))
    )
    for x, y in zip(clean, found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str, deterministic: bool) -> None:
    spec = replace(SPECS[name], deterministic=deterministic)
    module = rendered_module(spec, hopper=True)
    tensors, given, shown = _call(name)
    grads = []
    for x in (tensors, _dirty(name, tensors, shown)):
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        grads.append(torch.autograd.grad(module.attention(*leaves, **given), leaves, x[3]))
    hidden = [name == "keys d64", False, False]
    for clean, dirty, all_shown in zip(*grads, hidden, strict=True):
        assert torch.isfinite(dirty).all()
        if deterministic:
            assert torch.equal(clean, dirty)
        else:  # what TMA adds up comes in any order
            assert torch.allclose(clean.float(), dirty.float(), atol=2e-2, rtol=2e-2)
        if not all_shown:
            assert (dirty.where(~shown, 0.0) == 0).all()
