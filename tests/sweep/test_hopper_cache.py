"""Many queries of a cache by the Gluon forward kernel, on the CPU, against float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Int, Tensor, alibi, causal, full, sliding_window, softcap
from support.cached import CacheCall, cached, hold
from support.gluon import interpreted
from support.variants import rendered_module

FORMS = ("dense", "cache")
SLOPES = Tensor("slopes", ("num_q_heads",))

#: Every structure that head dimensions ask for, tiles of one head and of several, runs of keys from
#: the first on and of a window.
SPECS = {
    "causal_d64": AttentionSpec(
        64, "float16", mask=causal(align="bottom_right"), forms=("dense", "varlen", "cache")
    ),
    "causal_d128": AttentionSpec(128, mask=causal(align="bottom_right"), forms=FORMS),
    "full_d256": AttentionSpec(256, mask=full(), forms=FORMS),
    "window_d112": AttentionSpec(
        112, mask=sliding_window(Int("left", 70), 3), align="bottom_right", forms=FORMS
    ),
    "alibi_d80": AttentionSpec(
        80, mask=causal(), align="bottom_right", score=alibi(SLOPES), forms=FORMS
    ),
    "unequal_dims": AttentionSpec(
        (192, 128), mask=causal(align="bottom_right"), score=softcap(20.0), forms=FORMS
    ),
}
#: Rows and slots, and pages: smaller than a tile of keys, and larger.
ROWS = CacheCall((300, 0, 70, 130), 70, heads=8)
SLOTS = CacheCall((90, 200, 33), (40, 130, 33), heads=2, kv_heads=1, slots=True, padding=9)
SMALL = CacheCall((70, 0, 201, 40), 80, heads=4, page_size=16)
LARGE = CacheCall((300, 64, 65), (150, 0, 60), heads=4, kv_heads=4, page_size=256, padding=5)


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], name=name, hopper=True, edit_source=interpreted)


def _check(module: ModuleType, spec: AttentionSpec, call: CacheCall) -> None:
    given = cached(call, spec, getattr(torch, spec.dtype))
    with torch.no_grad():
        out, lse = module.cache_attention(**given.arguments, return_lse=True)
    hold(out, lse, given, spec, call)


@pytest.fixture(autouse=True)
def _by_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel computes a call."""
    for name in SPECS:
        monkeypatch.setattr(_module(name), "_launch_cache", None)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", SPECS)
def test_each_sequence_is_right(name: str, number: int) -> None:
    call = (ROWS, SLOTS, SMALL, LARGE)[number]
    if call.page_size and not hasattr(_module(name), "LEAST_PAGE"):
        return
    _check(_module(name), SPECS[name], call)


def _right(module: ModuleType, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    wide = {
        name: x.double() if name in ("q", "k_cache", "v_cache") else x
        for name, x in arguments.items()
    }
    out, lse = module.cache_reference(**wide, return_lse=True)
    return out, lse


@pytest.mark.parametrize("fault", ["pages", "lengths", "rows", "tokens"])
def test_a_sequence_at_fault_is_nan_and_changes_no_other(fault: str) -> None:
    """As the reference says: of a missing page, the rows that see one of its keys."""
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    call = SMALL if fault == "pages" else SLOTS
    arguments = cached(call, spec, torch.bfloat16).arguments
    if fault == "pages":
        arguments["block_table"][2, 11] = 10**6
        arguments["block_table"][0, 1] = -7
    elif fault == "lengths":
        arguments["kv_lens"][0], arguments["kv_lens"][1] = 10**9, -1
    elif fault == "rows":
        arguments["cache_slots"][1] = 5
    else:
        arguments["cu_seqlens_q"] = torch.tensor([0, 120, 100, 203], dtype=torch.int32)
    arguments["out"] = torch.full_like(arguments["q"], 7.0)
    with torch.no_grad():
        out, lse = module.cache_attention(**arguments, return_lse=True)
    given = arguments.pop("out")
    assert out is given and (out[203:] == 7.0).all()
    right, right_lse = _right(module, arguments)
    tokens = slice(0, 203 if call.packed else None)
    assert right[tokens].isnan().any() and not right[tokens].isnan().all()
    torch.testing.assert_close(
        out[tokens].double(), right[tokens], rtol=2e-2, atol=2e-2, equal_nan=True
    )
    torch.testing.assert_close(
        lse[tokens].double(), right_lse[tokens], rtol=1e-2, atol=1e-2, equal_nan=True
    )


@pytest.mark.parametrize("number", range(2))
def test_large_scores(number: int) -> None:
    """A tile of queries is handed over again once its weights have overflowed."""
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    call = (ROWS, SMALL)[number]
    given = cached(call, spec, torch.bfloat16)
    given.arguments["q"] *= 40.0
    with torch.no_grad():
        out, lse = module.cache_attention(**given.arguments, return_lse=True)
    hold(out, lse, replace(given, q=[40.0 * x for x in given.q]), spec, call)


def test_few_queries_pages_of_one_key_and_splits_are_for_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    calls = (
        replace(SMALL, page_size=1),
        CacheCall((70, 40, 33), (8, 1, 15), heads=4),
        replace(ROWS, num_splits=1),
    )
    taken: list[Any] = []
    monkeypatch.setattr(module, "_launch_cache", lambda *given: taken.append(given))
    for call in calls:
        arguments = cached(call, spec, torch.bfloat16).arguments
        with torch.no_grad():
            module.cache_attention(**arguments, num_splits=call.num_splits)
    assert len(taken) == len(calls)
    # Pages behind a window may be missing.
    module, spec = _module("window_d112"), SPECS["window_d112"]
    monkeypatch.setattr(module, "_launch_cache", lambda *given: taken.append(given))
    arguments = cached(SMALL, spec, torch.bfloat16).arguments
    with torch.no_grad():
        module.cache_attention(**arguments)
    assert len(taken) == len(calls) + 1


def test_calls_without_sequences_or_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module("causal_d128")
    monkeypatch.setattr(module, "_launch_cache", lambda *given: torch.zeros(given[0].shape[:-1]))
    q, cache = torch.zeros(0, 70, 8, 128).bfloat16(), torch.zeros(2, 0, 100, 2, 128).bfloat16()
    none = torch.zeros(0, dtype=torch.int32)
    with torch.no_grad():
        assert module.cache_attention(q, *cache, none).shape == q.shape
        packed = {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "max_q_len": 5}
        tokens = torch.zeros(300, 8, 128).bfloat16()
        module.cache_attention(tokens, *cache, none, **packed)


#: Faults of the kernel, by what is replaced: a call that shows each.
MUTANTS = (
    ("k_cache.transpose(1, 2), v_cache.transpose(1, 2)",
     "k_cache.transpose(1, 2).flip(1), v_cache.transpose(1, 2)", ROWS),
    ("place += _of_slot(mine, places)", "place += _of_slot(mine, b)", SLOTS),
    ("q_start += _of_slot(mine, first)", "q_start += _of_slot(mine, first * 0)", ROWS),
    ("tiles = tl.where((keys == 0) == of_keyless,", "tiles = tl.where(of_keyless == of_keyless,",
     ROWS),
    ("first % PAGE_SIZE, COLUMN], full", "0, COLUMN], full", LARGE),
    ("first = row + i * ROWS", "first = row", SMALL),
    ("tile.slice(i * ROWS, ROWS, 2)", "tile.slice(0, ROWS, 2)", SMALL),
    ("mask=first < kv_len, other=-1)", "mask=first >= 0, other=-1)",
     replace(SMALL, kv_lens=(70, 0, 40, 201))),
    ("heads = _heads(offs_m * 0, PACKED,", "heads = _heads(offs_m * 0, 1,", ROWS),
    ("head *= PACKED", "pass", ROWS),
)  # fmt: skip


@pytest.mark.parametrize(("before", "after", "call"), MUTANTS, ids=range(len(MUTANTS)))
def test_a_fault_is_found(before: str, after: str, call: CacheCall) -> None:
    def edit(source: str) -> str:
        assert before in source
        return interpreted(source.replace(before, after))

    spec = SPECS["causal_d128"]
    mutant = rendered_module(spec, hopper=True, edit_source=edit)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        _check(mutant, spec, call)
