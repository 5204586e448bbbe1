"""Which calls of the Gluon kernel have rows of several heads in a tile, and what is launched."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    block_sparse,
    causal,
    chosen_blocks,
    document,
    full,
    sliding_window,
    softcap,
    softmax,
)
from flashgen.budget.targets import get_target
from flashgen.budget.traffic import Workload
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.pack_gqa import heads_of_a_tile, launched
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.plan import KernelPlan, lower
from support.specialised import watch_hopper
from support.variants import rendered_module, shipped_module, shipped_plan, shipped_specs

SPEC = AttentionSpec(128, "bfloat16", causal(align="bottom_right"))
CONFIG = {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2}
BY_HEAD = Tensor("by_head", ("num_q_heads",), "int32")
SINK = Tensor("sink", ("num_q_heads",))


@functools.cache
def _chosen() -> tuple[KernelPlan, ModuleType]:
    spec = AttentionSpec(128, "bfloat16", chosen_blocks() & causal())
    return lower(spec, "x"), rendered_module(spec, hopper=True)


@functools.cache
def _module() -> ModuleType:
    return rendered_module(SPEC, hopper=True)


def _tensors(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int) -> list[torch.Tensor]:
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return [torch.zeros(batch, *size, 128, dtype=torch.bfloat16) for size in sizes]


def test_which_variants_pack() -> None:
    """Those to which it is one which head a row is of, whose tiles begin where they always do."""
    specs = shipped_specs() | {
        "window_by_head": AttentionSpec(64, mask=sliding_window(BY_HEAD, 0) & causal()),
        "sink_by_head": AttentionSpec(64, mask=full(), normaliser=softmax(sink=SINK)),
        "capped": AttentionSpec(64, mask=causal(), score=softcap(5.0)),
        "cut": AttentionSpec(64, mask=document() & causal()),
        "listed": AttentionSpec(64, mask=block_sparse(Tensor("table", (None, None), "bool"), 64)),
    }
    without = {name for name, spec in specs.items() if not HopperNames(lower(spec, name)).packs}
    assert without == {
        "alibi_d128", "documents_d128", "dropout_causal_d64", "sinks_softmax_d64",
        "window_by_head", "sink_by_head", "cut", "listed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "expected"),
    [
        (16, 32, 8, 1, 4),  # 512 tiles of a row each take four turns of 132 programs
        (1, 32, 8, 1, 1),  # 32 take one, as 8 would
        (64, 32, 8, 31, 4),
        (16, 32, 8, 4096, 1),  # as many tiles either way
        (16, 28, 4, 1, 1),  # seven heads share keys: no power of two divides them
        (16, 48, 8, 1, 2),
        (16, 64, 1, 1, 64),
        (16, 128, 1, 1, 64),  # a tile of 64 rows has no more heads
        (8, 32, 4, 130, 8),  # 512 tiles, the second of each head almost empty, or 288
        (8, 32, 8, 200, 1),  # four turns either way
        (500, 1, 1, 1, 1),
    ],
)  # fmt: skip
def test_where_it_pays(batch: int, heads: int, kv_heads: int, q_len: int, expected: int,
                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    watch_hopper(_module(), monkeypatch)
    q, k, _ = _tensors(batch, heads, kv_heads, q_len, 1)
    assert _module()._packed_heads(q, k, 128) == expected
    work = Workload(batch, heads, kv_heads, q_len, 1)
    config = KernelConfig(128, 128, 8, 2)
    assert heads_of_a_tile(lower(SPEC, "x"), config, get_target("sm_90"), work) == expected


@pytest.mark.parametrize(
    ("q_heads", "q_len", "block_m"),
    [
        (1, 1, 128),
        (1, 128, 128),
        (1, 129, 192),  # one tile in place of two
        (1, 193, 128),  # two either way
        (1, 257, 192),
        (1, 4096, 192),
        (4, 32, 128),  # of four heads
        (4, 33, 192),
        (4, 49, 128),
    ],
)
@pytest.mark.parametrize("name", ["causal_d64", "full_d128"])
def test_a_third_consumer_where_it_saves_tiles(
    name: str, q_heads: int, q_len: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, module = shipped_plan(name), shipped_module(name)
    chosen = KernelConfig(**module.HOPPER_CONFIG)
    assert chosen.BLOCK_M == 192
    hopper = watch_hopper(module, monkeypatch)
    head_dim = plan.qk_head_dim
    q = torch.zeros(200, q_heads, q_len, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(200, 1, q_len, head_dim, dtype=torch.bfloat16)
    module._launch_hopper(q, k, k, 0.1, module.HOPPER_CONFIG)
    found = hopper.arguments[-1]
    assert (found["BLOCK_M"], found["PACKED"]) == (block_m, q_heads)
    assert found["num_tiles"] == 200 * -(-q_len // (block_m // q_heads))
    work = Workload(200, q_heads, 1, q_len, q_len)
    heads = heads_of_a_tile(plan, chosen, get_target("sm_90"), work)
    assert (launched(plan, chosen, work, heads).BLOCK_M, heads) == (block_m, q_heads)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "q_len", "block_m", "tiles"),
    [
        (16, 2, 16384, 192, 768),  # 24, 24 and 16 queries: three tiles of a list, not four
        (16, 2, 8192 + 30, 192, 386),
        (32, 1, 8192, 192, 1408),  # six, six ... and four: eleven, not sixteen
        (16, 2, 1024, 128, 64),  # each program has one tile either way
        (16, 4, 16384, 128, 512),  # two tiles either way: 48 and 16 queries, or 32 and 32
        (16, 16, 16384, 128, 128),
    ],
)
def test_a_third_consumer_where_fewer_tiles_share_a_list(
    q_heads: int,
    kv_heads: int,
    q_len: int,
    block_m: int,
    tiles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, module = _chosen()
    chosen = KernelConfig(192, 64, 12, 4)
    hopper = watch_hopper(module, monkeypatch)
    q = torch.zeros(1, q_heads, q_len, 128, dtype=torch.bfloat16)
    k = torch.zeros(1, kv_heads, q_len, 128, dtype=torch.bfloat16)
    table = torch.zeros(1, kv_heads, -(-q_len // 64), -(-q_len // 64), dtype=torch.bool)
    rows, bits = [], torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(
        module, "_listed", lambda q, kv_len, listed, *_: rows.append(listed) or bits
    )
    module._launch_hopper(q, k, k, 0.1, table, bits, chosen.as_dict())
    found = hopper.arguments[-1]
    packed = q_heads // kv_heads
    assert (found["BLOCK_M"], found["PACKED"], found["num_tiles_m"]) == (block_m, packed, tiles)
    work = Workload(1, q_heads, kv_heads, q_len, q_len)
    assert rows == [max(64, 128 // packed)]
    assert launched(plan, chosen, work, packed).as_dict()["BLOCK_M"] == block_m


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = watch_hopper(_module(), monkeypatch)
    for q_len, packed, tiles in ((20, 8, 2), (5000, 1, 40)):
        _module()._launch_hopper(*_tensors(16, 32, 4, q_len, 8192), 0.1, CONFIG)
        found = hopper.arguments[-1]
        assert found["PACKED"] == packed
        for name in ("q_desc", "out_desc"):
            assert tuple(found[name].block_shape) == (1, packed, 64 // packed, 128)
        assert tuple(found["k_desc"].block_shape) == (1, 1, 128, 128)
        assert (found["num_tiles_m"], found["num_tiles"]) == (tiles, tiles * 16 * 32 // packed)
        # Six heads of k and v have room in L2: four of those that read them, or four of tiles.
        assert found["heads_together"] == {8: 4, 1: 32}[packed]
    assert hopper.grids == [(128,), (132,)] and len(hopper.keys) == 2
