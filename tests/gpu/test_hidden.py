"""What hidden rows hold, on a GPU: NaN behind lengths and in padding touches nothing."""

from __future__ import annotations

import functools
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


@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str) -> None:
    spec, module = SPECS[name], _module(name)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, spec.qk_head_dim)
    dtype = getattr(torch, spec.dtype)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in "qkv")
    lengths = torch.tensor(SHOWN, dtype=torch.int32, device="cuda")
    given = {"document_ids": _ids().cuda()} if name == "documents" else {"lengths": lengths}
    shown = (torch.arange(LENGTH, device="cuda") < lengths[:, None])[:, None, :, None]
    clean = module.attention(q, k, v, return_lse=True, **given)
    # The mask of "keys" shows something to every query.
    queries = q if name == "keys d64" else q.where(shown, torch.nan)
    dirty = (queries, *(x.where(shown, torch.nan) for x in (k, v)))
    found = module.attention(*dirty, return_lse=True, **given)
    for x, y in zip(clean, found, strict=True):
        assert torch.equal(x, y)
