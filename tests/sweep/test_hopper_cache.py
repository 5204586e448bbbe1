"""Many queries of a cache by the Gluon forward kernel, on the CPU, against float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    alibi,
    causal,
    full,
    sigmoid_attention,
    sliding_window,
    softcap,
)
from support.cached import CacheCall, cached, hold
from support.gluon import interpreted
from support.turns import in_turns
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
    splits = {"num_splits": call.num_splits}
    with torch.no_grad():
        out, lse = module.cache_attention(**given.arguments, **splits, return_lse=True)
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


#: Parts of the keys: as many as there are tiles of them, fewer, and more for some sequences, whose
#: parts then have none.
@pytest.mark.parametrize(
    ("name", "number", "num_splits"),
    in_turns(SPECS, [(0, 2), (0, 5), (1, 3), (2, 4), (3, 2)], every=2),
)
def test_any_number_of_parts_is_right(name: str, number: int, num_splits: int) -> None:
    call = replace((ROWS, SLOTS, SMALL, LARGE)[number], num_splits=num_splits)
    if call.page_size and not hasattr(_module(name), "LEAST_PAGE"):
        return
    _check(_module(name), SPECS[name], call)


def test_parts_of_weights_that_depend_on_no_other_key() -> None:
    """The output of a sigmoid is the sum of its parts."""
    mask = causal(align="bottom_right")
    spec = AttentionSpec(64, mask=mask, normaliser=sigmoid_attention(), forms=FORMS)
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    module._launch_cache = None  # type: ignore[attr-defined]
    _check(module, spec, replace(ROWS, num_splits=3))


def test_parts_of_a_sequence_at_fault_are_nan() -> None:
    """Lengths, and a page: rows that see it, by whichever part."""
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    arguments = cached(SMALL, spec, torch.bfloat16).arguments
    arguments["block_table"][2, 11] = 10**6
    arguments["block_table"][0, 1] = -7
    arguments["kv_lens"][3] = 10**9
    with torch.no_grad():
        out, lse = module.cache_attention(**arguments, num_splits=3, return_lse=True)
    right, right_lse = _right(module, arguments)
    assert right.isnan().any() and not right.isnan().all()
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_how_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fill the SMs: none where tiles of queries do, or where there are few keys."""
    module = _module("causal_d128")
    monkeypatch.setattr(module, "_num_sms", lambda device: 132)

    def parts(*call: int, keys: int, num_splits: int | None = None) -> int:
        return module._cache_tile(None, *call, keys, num_splits)[2]

    assert parts(16, 16, 2, 256, keys=8192) == 2  # 64 tiles
    assert parts(32, 8, 1, 64, keys=4096) > 4  # 16 tiles
    assert parts(32, 8, 1, 64, keys=4096, num_splits=3) == 3
    assert parts(32, 8, 1, 512, keys=8192) == 1  # 128 tiles
    assert parts(32, 8, 64, 32, keys=8192) == 1
    assert parts(16, 16, 2, 256, keys=128) == 1


TILES = ((192, 64, 4, 192), (128, 128, 2, 141))


def test_which_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three consumers, or two with twice the keys where that takes fewer rounds."""
    module = _module("causal_d128")
    monkeypatch.setattr(module, "_num_sms", lambda device: 132)
    monkeypatch.setattr(module, "CACHE_TILES", TILES)

    def tile(*call: int, keys: int) -> tuple[int, int, int]:
        found: tuple[int, int, int] = module._cache_tile(None, *call, keys, None)[0]
        return found

    assert tile(32, 8, 1, 512, keys=16_384) == (128, 128, 2)  # 128 tiles, not 96
    assert tile(32, 8, 1, 640, keys=16_384) == (192, 64, 4)  # 128 tiles, not 160


#: Packed queries and pages that are smaller than any tile, with keys in parts.
FEW_HEADS = CacheCall((70, 300, 150), (3, 100, 80), heads=8, kv_heads=1, page_size=16, padding=7)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("tile", TILES, ids=["192", "128"])
def test_tiles_of_any_consumers(
    tile: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of three consumers, and of two with twice the keys, which lie on more pages."""
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    monkeypatch.setattr(module, "CACHE_TILES", (tile,))
    splits = (None, 3, 2, None, 2)[number]
    call = (ROWS, SLOTS, SMALL, LARGE, FEW_HEADS)[number]
    _check(module, spec, replace(call, num_splits=splits))


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


@pytest.mark.parametrize("num_splits", [None, 3])
@pytest.mark.parametrize("number", range(2))
def test_large_scores(number: int, num_splits: int | None) -> None:
    """A tile of queries is handed over again once its weights have overflowed."""
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    call = (ROWS, SMALL)[number]
    given = cached(call, spec, torch.bfloat16)
    given.arguments["q"] *= 40.0
    splits = {"num_splits": num_splits}
    with torch.no_grad():
        out, lse = module.cache_attention(**given.arguments, **splits, return_lse=True)
    hold(out, lse, replace(given, q=[40.0 * x for x in given.q]), spec, call)


def test_few_queries_and_pages_of_one_key_are_for_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, spec = _module("causal_d128"), SPECS["causal_d128"]
    calls = (
        replace(SMALL, page_size=1),
        CacheCall((70, 40, 33), (8, 1, 15), heads=4),
    )
    taken: list[Any] = []
    monkeypatch.setattr(module, "_launch_cache", lambda *given: taken.append(given))
    for call in calls:
        arguments = cached(call, spec, torch.bfloat16).arguments
        with torch.no_grad():
            module.cache_attention(**arguments)
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
    ("tiles = tl.where((keys == 0) == of_keyless,", "tiles = tl.where((keys > 0) & of_keyless,",
     ROWS),
    ("first % PAGE_SIZE, COLUMN], full", "0, COLUMN], full", LARGE),
    ("first = row + i * ROWS", "first = row", SMALL),
    ("tile.slice(i * ROWS, ROWS, 2)", "tile.slice(0, ROWS, 2)", SMALL),
    ("mask=first < kv_len, other=-1)", "mask=first >= 0, other=-1)",
     replace(SMALL, kv_lens=(70, 0, 40, 201))),
    ("heads = _heads(offs_m * 0, PACKED,", "heads = _heads(offs_m * 0, 1,", ROWS),
    ("head *= PACKED", "pass", ROWS),
    ("first_visit = split * share + min(split, more)", "first_visit = split * share",
     replace(ROWS, num_splits=2)),
    ("visit += _handed_over(10, place)", "pass", replace(ROWS, num_splits=2)),
    ("rows = rows * num_splits + _split(place)", "rows = rows * num_splits",
     replace(ROWS, num_splits=2)),
    ("(tl.load(slots_ptr + 2) + first)", "tl.load(slots_ptr + 2)", replace(SLOTS, num_splits=2)),
)  # fmt: skip


@pytest.mark.parametrize(("before", "after", "call"), MUTANTS, ids=range(len(MUTANTS)))
def test_a_fault_is_found(before: str, after: str, call: CacheCall) -> None:
    _find(before, after, call, SPECS["causal_d128"])


#: Faults of parts that a causal mask does not show: a window skips keys at both ends, and a part of
#: keys that a mask does not hide is never empty but for this.
OF_PARTS = (
    ("first, last = first - first_visit, max(last - first_visit, 0)", "pass", "window"),
    ('out = tl.where((lse == float("-inf"))[:, None], 0.0, out)', "pass", "full"),
)


@pytest.mark.parametrize(("before", "after", "mask"), OF_PARTS, ids=range(len(OF_PARTS)))
def test_a_fault_of_parts_is_found(before: str, after: str, mask: str) -> None:
    window = sliding_window(100, 0, align="bottom_right")
    spec = AttentionSpec(128, mask=window if mask == "window" else full(), forms=FORMS)
    call = CacheCall((700, 40), 200, heads=2, num_splits=2)
    _check(rendered_module(spec, hopper=True, edit_source=interpreted), spec, call)
    _find(before, after, call, spec)


def _find(before: str, after: str, call: CacheCall, spec: AttentionSpec) -> None:
    def edit(source: str) -> str:
        assert before in source
        return interpreted(source.replace(before, after))

    mutant = rendered_module(spec, hopper=True, edit_source=edit)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        _check(mutant, spec, call)
