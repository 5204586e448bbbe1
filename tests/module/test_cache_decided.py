"""Calls of a cache whose tiles of keys are decided: two launches, which are repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Int, Tensor, causal
from support.cached import FORMS, CacheCall, cached
from support.fake_gpu import fake_gpu, module_on, named

IDS = Tensor("ids", ("batch", "kv_len"), "int32")
#: Ids of keys, of which the least that is seen is a number of the call.
DECIDED = AttentionSpec(
    64,
    "float16",
    mask=causal() & (lambda b, h, q_idx, kv_idx: IDS[b, kv_idx] >= Int("least")),
    align="bottom_right",
    forms=FORMS,
)


def test_repeated_launches_of_decided_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels get what ordinary launches pass: other tensors, and another number."""
    gpu = fake_gpu(monkeypatch)
    module = module_on(gpu, DECIDED, monkeypatch)
    call = CacheCall((300, 280), heads=8, kv_heads=2, page_size=16)

    def noted(least: int) -> Any:
        given = cached(replace(call, params={"least": least}), DECIDED, torch.float16).arguments
        given["out"] = torch.empty_like(given["q"])
        before = len(gpu.calls)
        with torch.no_grad():
            module.cache_attention(**given)
        names = {x.data_ptr(): n for n, x in given.items() if isinstance(x, torch.Tensor)}
        return named(tuple(gpu.calls[before:]), names), given

    first, kept_alive = noted(3)
    of_kernels = [f"function {name}" for name in ("_decide_cache_tiles", "_cache_attention")]
    assert [x[4] for x in first] == of_kernels
    assert len(module._LAUNCHES) == 1
    binds = gpu.binds
    repeated, others = noted(5)
    assert gpu.binds == binds
    module._LAUNCHES.clear()
    ordinary, _ = noted(5)
    assert repeated == ordinary != first
    assert kept_alive is not others
