"""Tiles that hold rows of several heads, which share keys: the Gluon forward kernel on the CPU."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen import (
    AttentionSpec,
    Int,
    causal,
    chunked,
    full,
    prefix_lm,
    sigmoid_attention,
    sliding_window,
    softcap,
)
from flashgen.config import KernelConfig
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from support.cases import Case
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.hopper import check_hopper

END = causal(align="bottom_right")
LEFT = Int("left", 90, min=0)

#: Every structure that head dimensions ask for, with and without tiles that consumers skip; runs of
#: keys from the first on, of a window and of several.
SPECS = {
    "full_d64": AttentionSpec(64, "bfloat16", full()),
    "causal_d64": AttentionSpec(64, "float16", END),
    "causal_d80": AttentionSpec(80, "bfloat16", END),
    "causal_d128": AttentionSpec(128, "bfloat16", END),
    "causal_d192_v128": AttentionSpec((192, 128), "bfloat16", END),
    "causal_d256": AttentionSpec(256, "bfloat16", END),
    "window_d64": AttentionSpec(64, "bfloat16", sliding_window(70, 3, align="bottom_right")),
    "left_d128": AttentionSpec(128, "float16", sliding_window(LEFT, 0, align="bottom_right")),
    "two_runs_d128": AttentionSpec(
        128,
        "bfloat16",
        sliding_window(60, 0, align="bottom_right") | prefix_lm(20, align="bottom_right"),
    ),
    "chunked_d64": AttentionSpec(64, "bfloat16", chunked(48)),
    "softcap_d128": AttentionSpec(128, "bfloat16", END, softcap(20.0)),
    "sigmoid_d64": AttentionSpec(64, "bfloat16", END, normaliser=sigmoid_attention()),
}


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True, edit_source=interpreted)


@functools.cache
def _config(name: str) -> KernelConfig:
    plan = lower(SPECS[name], name)
    assert HopperNames(plan).packs
    return rank_hopper(plan, hopper_space(plan).candidates)[0]


CALLS = [(packed, turn) for turn in range(5) for packed in (2, 4, 16, 64)]


@pytest.mark.parametrize(("name", "packed", "turn"), in_turns(SPECS, CALLS, every=7))
def test_values(name: str, packed: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many heads as a tile is told to hold, over lengths that fill tiles and do not."""
    module, spec = _module(name), SPECS[name]
    monkeypatch.setattr(module, "_packed_heads", lambda q, k, block_m: packed)
    length = 192 // packed
    lengths = [(1, 1), (1, 200), (length, 300), (length + 1, length + 1), (2 * length + 3, 150)]
    if spec.equal_lengths:
        lengths = [(q_len, q_len) for q_len, _ in lengths]
    q_len, kv_len = lengths[turn]
    kv_heads = 1 if packed > 4 else 1 + turn % 2
    layout = ("contiguous", "transposed", "padded")[turn % 3]
    case = Case(q_len, kv_len, 1 + turn % 2, packed * kv_heads, kv_heads, layout)
    check_hopper(module, spec, case, _config(name))
