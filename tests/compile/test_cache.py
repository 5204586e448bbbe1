"""The cache kernel becomes machine code, in the memory that is predicted, and does not spill."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen import (
    AttentionSpec,
    Tensor,
    alibi,
    block_sparse,
    causal,
    document,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
    tree,
)
from flashgen.budget.occupancy import register_limit
from flashgen.budget.targets import get_target
from flashgen.kernels.cache_triton.rank import rank_cache
from flashgen.kernels.cache_triton.shared_memory import cache_usage
from flashgen.kernels.cache_triton.space import cache_space, for_many_rows
from flashgen.plan import lower
from support.compiling.cache import cache_bytes, compile_cache, compile_deciding
from support.turns import some

BOTTOM = causal(align="bottom_right")
SINKS = Tensor("sinks", ("num_q_heads",))
SLOPES = Tensor("slopes", ("num_q_heads",))
IDS = Tensor("ids", ("batch", "kv_len"), "int32")
KEPT = Tensor("kept", ("num_q_heads", "kv_len"), "bool")
WIDTHS = Tensor("widths", ("num_q_heads",), "int32")
CACHED: Any = {"align": "bottom_right", "forms": ("dense", "cache")}
SPECS = {
    "causal_d128": AttentionSpec(128, mask=BOTTOM),
    "window_d64": AttentionSpec(
        64, "float16", mask=sliding_window(1024, 0, align="bottom_right"), score=softcap(30.0)
    ),
    "alibi_sinks_d128": AttentionSpec(
        128, mask=BOTTOM, score=alibi(SLOPES, align="bottom_right"), normaliser=softmax(sink=SINKS)
    ),
    "sigmoid_d80": AttentionSpec(80, mask=BOTTOM, normaliser=sigmoid_attention()),
    "causal_d192_v128": AttentionSpec((192, 128), mask=BOTTOM),
    "causal_d256": AttentionSpec(256, mask=BOTTOM),
    "causal_fp32_d64": AttentionSpec(64, "float32", mask=BOTTOM),
    "tree_d128": AttentionSpec(128, mask=tree()),
    "documents_d128": AttentionSpec(128, mask=document(align="bottom_right")),
    "blocks_d128": AttentionSpec(128, mask=block_sparse()),
    "ids_d128": AttentionSpec(
        128, mask=causal() & (lambda b, h, q, kv: IDS[b, q] == IDS[b, kv]), **CACHED
    ),
    "heads_d128": AttentionSpec(128, mask=causal() & (lambda b, h, q, kv: KEPT[h, kv]), **CACHED),
    "windows_d128": AttentionSpec(
        128, mask=causal() & (lambda b, h, q, kv: q - kv < WIDTHS[h]), **CACHED
    ),
}
PLANS = {name: lower(spec, name) for name, spec in SPECS.items()}
TARGETS = ("sm_80", "sm_90", "sm_100")

#: Values that rest in memory between two loops cost nothing.
HARMLESS_BYTES = 128

#: What such values take where they are more, by the plan and the page. A step of this one, of
#: 1,320 instructions, reads two words of them back and writes none; the others rest around it.
RESTING_BYTES = {("sigmoid_d80", 0): 168}


def both(name: str, target: str):
    """The configurations of few rows and of many that a module ships."""
    plan = PLANS[name]
    few = rank_cache(plan, target, cache_space(plan, target).candidates)[0]
    return few, for_many_rows(plan, few, get_target(target))


@pytest.mark.parametrize("target", (*TARGETS, "gfx942"))
@pytest.mark.parametrize("name", PLANS)
def test_what_ships_needs_no_more_than_predicted(name: str, target: str) -> None:
    for config in both(name, target):
        for page_size in (0, 16):
            predicted = cache_usage(PLANS[name], config, get_target(target), paged=page_size > 0)
            assert predicted.fits
            needed = cache_bytes(PLANS[name], config, target, page_size)
            assert needed <= predicted.total, (config, page_size, predicted.breakdown)


@pytest.mark.parametrize("name", some(("causal_d128", "window_d64", "causal_d256"), every=2))
def test_the_space_needs_exactly_what_is_predicted(name: str) -> None:
    plan = PLANS[name]
    for config in cache_space(plan, "sm_90").candidates:
        predicted = cache_usage(plan, config, get_target("sm_90"))
        assert cache_bytes(plan, config, "sm_90") == predicted.total, config


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", ("ids_d128", "heads_d128", "documents_d128", "blocks_d128"))
def test_deciding_tiles_takes_few_registers(name: str, rows: int) -> None:
    """So that an SM runs four programs at once, and next to nothing spills."""
    few, _ = both(name, "sm_90")
    compiled = compile_deciding(PLANS[name], few, "sm_90", rows)
    assert compiled.spilled <= 16
    assert compiled.registers <= 128


@pytest.mark.parametrize("page_size", [0, 1, 16, 256])
@pytest.mark.parametrize("name", some(PLANS, every=3))
def test_steps_do_not_spill(name: str, page_size: int) -> None:
    few, _ = both(name, "sm_90")
    compiled = compile_cache(PLANS[name], few, "sm_90", page_size)
    assert compiled.spilled <= RESTING_BYTES.get((name, page_size), HARMLESS_BYTES)
    assert compiled.registers <= register_limit(few, get_target("sm_90"))
