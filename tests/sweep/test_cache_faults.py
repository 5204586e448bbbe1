"""Lengths, places and pages that do not exist: NaN for the sequence at fault, and for no other."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, causal, sliding_window
from support.cached import CacheCall, Cached, cached
from support.variants import rendered_module
from sweep.test_cache import IN_GAPS

SPEC = AttentionSpec(16, "float32", mask=causal(align="bottom_right"), forms=("dense", "cache"))
PACKED = CacheCall((40, 50, 9, 33), (4, 3, 1, 5), padding=2, num_splits=2)
FULL = CacheCall((40, 50, 9, 33), (4, 5, 1, 3), num_splits=2)
ROWS = CacheCall((40, 50, 9), 2, slots=True, num_splits=2)
PAGES = CacheCall((70, 50, 33), 2, page_size=16, num_splits=3)

#: A call, what is written into one of its tensors, and the sequences at fault.
FAULTS: dict[str, tuple[CacheCall, str, Any, Any, tuple[int, ...]]] = {
    "a length past the rows": (ROWS, "kv_lens", 1, 10**6, (1,)),
    "a negative length": (ROWS, "kv_lens", 2, -1, (2,)),
    "a length past the pages": (PAGES, "kv_lens", 0, 16 * 5 + 1, (0,)),
    "a row that does not exist": (ROWS, "cache_slots", 0, 5, (0,)),
    "a negative row": (ROWS, "cache_slots", 0, -3, (0,)),
    "a page that does not exist": (PAGES, "block_table", (1, 2), 10**6, (1,)),
    "a page that was given back": (PAGES, "block_table", (1, 3), -1, (1,)),
    "a first sequence that does not start at 0": (PACKED, "cu_seqlens_q", 0, 1, (0,)),
    "a negative start": (PACKED, "cu_seqlens_q", 0, -1, (0,)),
    "an end before the start": (PACKED, "cu_seqlens_q", 2, 3, (1, 2)),
    "an end past the tokens": (FULL, "cu_seqlens_q", 4, 14, (3,)),
    "more queries than the largest number": (PACKED, "cu_seqlens_q", 4, 15, (3,)),
}


def called(module: ModuleType, call: CacheCall, given: Cached) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as tokens, with 7 where nothing was written."""
    q = given.arguments["q"]
    out = torch.full(q.shape, 7.0)
    with torch.no_grad():
        _, lse = module.cache_attention(
            **given.arguments, num_splits=call.num_splits, out=out, return_lse=True
        )
    return (out, lse) if call.packed else (out.flatten(0, 1), lse.flatten(0, 1))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_nan_and_changes_no_other_sequence(name: str) -> None:
    call, argument, place, value, at_fault = FAULTS[name]
    module, given = rendered_module(SPEC), cached(call, SPEC, torch.float32)
    for cache in ("k_cache", "v_cache"):  # what lies behind the keys would be NaN by itself
        given.arguments[cache].nan_to_num_(0.0)
    right, right_lse = called(module, call, given)
    begins = [sum(call.lengths[:b]) for b in range(len(call.lengths) + 1)]
    given.arguments[argument][place] = value
    out, lse = called(module, call, given)
    bad = torch.zeros(len(out), dtype=torch.bool)
    if argument != "cu_seqlens_q":
        for b in at_fault:
            bad[begins[b] : begins[b + 1]] = True
    else:
        begins = given.arguments[argument].tolist()
        own = 0
        for b in range(len(call.lengths)):
            own = max(own, begins[b])
            if b in at_fault:
                bad[own : min(max(begins[b + 1], own), len(out))] = True
    assert out[bad].isnan().all() and lse[bad].isnan().all()
    others = ~bad
    if argument == "cu_seqlens_q":
        others[: min(1, begins[0] + 1)] &= begins[0] <= 0  # tokens that no sequence has
    torch.testing.assert_close(out[others], right[others])  # other splits round otherwise
    written = others & (right[:, 0, 0] != 7.0)
    torch.testing.assert_close(lse[written], right_lse[written])
    reference = module.cache_reference(**given.arguments)
    reference = reference if call.packed else reference.flatten(0, 1)
    assert torch.equal(reference[bad].isnan(), out[bad].isnan())
    assert not reference[written].isnan().any()


def test_a_cache_without_pages() -> None:
    """No page is read in place of one that is missing."""
    given = cached(replace(PAGES, kv_lens=(70, 0, 33)), SPEC, torch.float32)
    given.arguments |= {name: given.arguments[name][:0] for name in ("k_cache", "v_cache")}
    with torch.no_grad():
        out = rendered_module(SPEC).cache_attention(**given.arguments)
    assert out[::2].isnan().all() and not out[1].any()


def test_a_page_that_is_missing_beside_unseen_ones_is_a_fault() -> None:
    spec, call = IN_GAPS[0]
    given = cached(call, spec, torch.float16)
    given.arguments["block_table"][0, 4] = -1  # its 17th keys are those of page 1, which none sees
    with torch.no_grad():
        out = rendered_module(spec).cache_attention(**given.arguments)
    assert out[0].isnan().all() and not out[1:].isnan().any()


#: Writes the keys by which the shares of each sequence are counted.
PROBE = """

@triton.jit
def counted(out_ptr, kv_lens_ptr, cu_seqlens_ptr):
    index = tl.arange(0, 4)
    lengths = _cache_lengths(index, kv_lens_ptr, cu_seqlens_ptr, 3, 30, 10, 1000, True)
    tl.store(out_ptr + index, lengths[2])
"""


def test_keys_of_too_many_queries_are_not_counted() -> None:
    """Each of 100 sequences could have all tokens: their shares would pass 32 bits."""
    module = rendered_module(SPEC, edit_source=lambda source: source + PROBE)
    lens, begins = (torch.tensor(x, dtype=torch.int32) for x in ([900] * 3, [0, 10, 25, 30]))
    out = torch.zeros(4, dtype=torch.int32)
    module.counted[(1,)](out, lens, begins)
    assert out.tolist() == [900, 0, 900, 0]


def test_padding_is_not_written() -> None:
    out, _ = called(rendered_module(SPEC), PACKED, cached(PACKED, SPEC, torch.float32))
    assert (out[-PACKED.padding :] == 7.0).all() and not (out[: -PACKED.padding] == 7.0).any()


@pytest.mark.parametrize("name", FAULTS)
def test_a_message_names_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, argument, place, value, _ = FAULTS[name]
    given = cached(call, SPEC, torch.float32)
    given.arguments[argument][place] = value
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    named = "max_q_len" if name.startswith("more queries") else argument
    with pytest.raises(ValueError, match=rf"^{named}(\[[\d, ]+\])?: is -?\d+"):
        called(rendered_module(SPEC), call, given)


def test_a_page_that_a_window_has_left_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    mask = sliding_window(5, 0, align="bottom_right")
    spec = AttentionSpec(16, "float32", mask=mask, forms=SPEC.forms)
    given = cached(PAGES, spec, torch.float32)
    given.arguments["block_table"][0, 0] = -1
    out, _ = called(rendered_module(spec), PAGES, given)
    assert not out.isnan().any()


#: Two tokens each of two sequences in pages of 16: what is wrong, and what a call says.
APPENDED: dict[str, tuple[str, Any, Any, str]] = {
    "a length": ("kv_lens", 1, 49, "kv_lens[1]: is 49; the cache holds 0 to 48 keys"),
    "angles": ("kv_lens", 1, 44, "kv_lens[1]: is 44; rotary_cos has 43 positions"),
    "a page": ("block_table", (1, 2), -1, "block_table[1, 2]: is -1; k_cache has pages 0 to 5"),
    "the page before": ("block_table", (0, 0), 6,
                        "block_table[0, 0]: is 6; k_cache has pages 0 to 5"),
    "a start": ("cu_seqlens", 0, 1, "cu_seqlens[0]: is 1; start at 0"),
    "a fall": ("cu_seqlens", 2, 1, "cu_seqlens[2]: is 1, after 2; it may not fall"),
    "an end": ("cu_seqlens", 2, 5, "cu_seqlens[2]: is 5; k_new has 4 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", APPENDED)
def test_what_append_says_of_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, place, value, message = APPENDED[name]
    new, angles = torch.randn(4, 2, 16), torch.zeros(43, 4)
    caches = torch.zeros(2, 6, 16, 2, 16)
    given = {
        "kv_lens": torch.tensor([17, 43], dtype=torch.int32),
        "block_table": torch.arange(6, dtype=torch.int32).view(2, 3),
        "cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    given["block_table"][0, 2] = given["block_table"][1, 0] = -1  # of no new key
    monkeypatch.setenv("FLASHGEN_CHECK", "1")
    append = rendered_module(SPEC).append
    with torch.no_grad():
        append(new, new, *caches, rotary_cos=angles, rotary_sin=angles, **given)
        caches.zero_()
        given[argument][place] = value
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            append(new, new, *caches, rotary_cos=angles, rotary_sin=angles, **given)
    assert not caches.any()


def test_an_appended_token_without_a_place_is_not_written() -> None:
    module = rendered_module(SPEC)
    k_new, v_new = torch.randn(2, 4, 2, 2, 16)
    caches = torch.zeros(2, 4, 16, 2, 16)
    lens = torch.tensor([2, 9, 17, -(2**31)], dtype=torch.int32)
    # Of sequence 0 the pages end too early; sequence 2 is longer than its pages. Of sequence 3,
    # positions would wrap around.
    table = torch.tensor([[-1], [2], [1], [3]], dtype=torch.int32)
    angles = torch.zeros(9, 4)
    with torch.no_grad():
        q = module.append(
            k_new, v_new, *caches, lens, table, angles.cos(), angles.sin(), q=k_new.clone()
        )
    assert torch.equal(caches[1, 2, 7:9], v_new[1]) and torch.equal(caches[0, 2, 7:9], k_new[1])
    caches[:, 2, 7:9] = 0
    assert not caches.any()
    assert q[[0, 2, 3]].isnan().all() and torch.equal(q[1], k_new[1])
    assert math.isfinite(q[1].sum())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_beyond_the_angles_is_nan(
    eager: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind the tables is not read, and no other sequence changes."""
    module = rendered_module(SPEC)
    if eager:
        monkeypatch.setattr(module.triton.knobs.runtime, "interpret", False)
    new = torch.randn(3, 2, 2, 16)
    caches = torch.randn(2, 3, 128, 2, 16)
    lens = torch.tensor([20, 100, 21], dtype=torch.int32)  # of the last one a token has its angle
    more = torch.randn(128, 4)
    begins = {"cu_seqlens": torch.tensor([0, 2, 4, 6], dtype=torch.int32)} if packed else {}
    new = new.flatten(0, 1) if packed else new
    results = []
    for count in (128, 20):
        kept = caches.clone()
        rotary = more.cos()[:count], more.sin()[:count]
        with torch.no_grad():
            q = module.append(new, new, *kept, lens, None, *rotary, q=new, **begins)
            queries = {"cu_seqlens_q": begins["cu_seqlens"], "max_q_len": 2} if packed else {}
            out = module.cache_attention(q, *kept, lens, **queries)
        results.append((kept, q.view(3, 2, 2, 16), out.view(3, 2, 2, 16)))
    (right, right_q, right_out), (kept, q, out) = results
    missing = torch.zeros(3, 2, dtype=torch.bool)
    missing[1] = missing[2, 1] = True
    assert q[missing].isnan().all() and torch.equal(q[~missing], right_q[~missing])
    assert out[missing].isnan().all() and torch.equal(out[~missing], right_out[~missing])
    right[0, 1, 98:100] = right[0, 2, 20] = math.nan  # values are not rotated
    assert torch.equal(kept.nan_to_num(7.0), right.nan_to_num(7.0))


def test_appended_padding_of_no_sequence_reads_no_length() -> None:
    q, angles = torch.randn(3, 2, 16), torch.zeros(9, 4)
    ends, lens = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    caches = torch.zeros(2, 0, 16, 2, 16)
    with torch.no_grad():
        q = rendered_module(SPEC).append(
            q, q, *caches, lens, None, angles, angles, q=q, cu_seqlens=ends
        )
    assert q.isnan().all()


def test_queries_are_rotated_where_there_are_no_heads_of_keys() -> None:
    none, angles = torch.empty(2, 1, 0, 16), torch.randn(9, 4)
    q, lens = torch.randn(2, 1, 4, 16), torch.tensor([3, 5], dtype=torch.int32)
    rotary = angles.cos(), angles.sin()
    keys, caches = torch.randn(2, 1, 1, 16), torch.empty(2, 2, 9, 0, 16)
    with torch.no_grad():
        module = rendered_module(SPEC)
        got = module.append(none, none, *caches, lens, None, *rotary, q=q)
        right = module.append(keys, keys, *torch.empty(2, 2, 9, 1, 16), lens, None, *rotary, q=q)
    assert torch.equal(got, right)
