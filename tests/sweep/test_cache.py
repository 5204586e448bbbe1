"""The cache kernel in the interpreter, against float64: masks, scores, places and splits."""

from __future__ import annotations

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    causal,
    sigmoid_attention,
    sink_tokens,
    sliding_window,
    softcap,
    softmax,
    tree,
)
from support.cached import CacheCall, cached, check_cached, hold, with_queries
from support.variants import rendered_module
from support.vocabulary import VOCABULARY

FORMS = ("dense", "cache")
SINKS = Tensor("sinks", ("num_q_heads",))
WINDOW = AttentionSpec(
    16,
    "float16",
    mask=sliding_window(20, 0, align="bottom_right") | sink_tokens(4),
    score=softcap(3.0),
    normaliser=softmax(sink=SINKS),
    forms=FORMS,
)
CAUSAL = AttentionSpec(
    (24, 40), "float16", mask=causal(align="bottom_right"), normaliser=sigmoid_attention(),
    forms=FORMS,
)  # fmt: skip
#: Without keys that all queries see: the pages behind its window can be given back.
BEHIND = AttentionSpec(16, "float16", mask=sliding_window(20, 0, align="bottom_right"), forms=FORMS)
#: Its bounds hold pages of 16 keys that no query sees, as every other one before query 64.
GAPS = AttentionSpec(
    16,
    "float16",
    mask=causal() & (lambda b, h, q_idx, kv_idx: (q_idx // 64 + kv_idx // 16) % 2 == 0),
    align="bottom_right",
    forms=FORMS,
)
#: A tensor tells which keys are seen.
KEPT = Tensor("kept", (None,), dtype="bool")
EVICTED = AttentionSpec(
    (16, 24),
    "float16",
    mask=causal(align="bottom_right") & (lambda b, h, q_idx, kv_idx: KEPT[kv_idx % 3]),
    score=softcap(3.0),
    forms=FORMS,
)
TREE = AttentionSpec(16, "float16", mask=tree(), forms=FORMS)
PLAIN = AttentionSpec(16, "float32", mask=causal(align="bottom_right"), forms=FORMS)

#: Between them: lengths of 0 and 1, and beside multiples of the tile's 16 keys; one query, some,
#: and more than a tile of 16 or of 128 rows has; every kind of place; 1 to 64 splits, of which more
#: are merged than at a time; groups of 1, 2, 3 and 16 heads.
CALLS = (
    CacheCall((0, 1, 37, 64, 150), num_splits=1),
    CacheCall((15, 16, 17, 200), 3, heads=6, num_splits=3),
    CacheCall((170, 141), 140, heads=2, kv_heads=2, num_splits=2),
    CacheCall((400, 20, 3), 1, heads=16, kv_heads=1, slots=True, num_splits=64),
    CacheCall((0, 33, 70, 19), 2, page_size=16, num_splits=4),
    CacheCall((100, 1, 48), 1, page_size=1, freed=21, heads=2),
    CacheCall((100, 64, 130), 3, page_size=32, num_splits=1),
    CacheCall((40, 0, 9, 75), (5, 0, 1, 20), page_size=64, padding=3),
    CacheCall((40, 12, 9, 33), (0, 12, 1, 30), heads=3, kv_heads=1, num_splits=2, padding=2),
)


EVICTING = {"kept": torch.tensor([True, False, True])}

#: Pages of which keys are hidden though they are within the bounds.
IN_GAPS = (
    (GAPS, CacheCall((190, 17, 64), 3, page_size=16, gap=2, num_splits=3)),
    (EVICTED, CacheCall((50, 2, 33), (2, 1, 5), page_size=1, gap=3, padding=1, params=EVICTING)),
)


@pytest.mark.parametrize("spec, call", IN_GAPS, ids=["remainders", "tensor"])
def test_pages_without_a_key_that_a_query_sees(spec: AttentionSpec, call: CacheCall) -> None:
    check_cached(rendered_module(spec), spec, call, torch.float16)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("spec", [WINDOW, CAUSAL, PLAIN], ids=["window", "causal", "plain"])
def test_calls(spec: AttentionSpec, call: CacheCall) -> None:
    spec = spec if call.freed is None else BEHIND
    check_cached(rendered_module(spec), spec, call, getattr(torch, spec.dtype))


#: Lists of chosen blocks have the dense form alone.
OTHERS = {
    name: entry
    for name, entry in VOCABULARY.items()
    if not (entry.equal_lengths or name.startswith("chosen"))
}


@pytest.mark.parametrize("name", OTHERS)
def test_vocabulary(name: str) -> None:
    entry = OTHERS[name]
    number = list(OTHERS).index(name)
    call = (
        CacheCall((12, 37, 70), 5, num_splits=3),
        CacheCall((9, 33, 64), (4, 1, 30), heads=4, kv_heads=1, padding=1),
        CacheCall((20, 49, 70), 2, page_size=16, num_splits=2),
    )[number % 3]
    heads = entry.odd_heads if entry.odd_heads != 3 else call.heads
    call = CacheCall(**{**vars(call), "heads": heads, "kv_heads": min(call.kv_heads, heads)})
    if name.startswith("tree") and call.packed:
        call = with_queries(call, 5)
    call = CacheCall(**{**vars(call), "params": entry.values(call.largest)})
    spec = entry.spec(forms=FORMS)
    check_cached(rendered_module(spec), spec, call, torch.float16)


def test_sequences_of_several_vectors() -> None:
    """Of many sequences, each vector of them is looked at again for each unit."""

    def in_pairs(source: str) -> str:
        few = "sequences = next((n for n in (1, 16, 128) if batch <= n), 1024)"
        assert source.count(few) == 1
        return source.replace(few, "sequences = 2")

    module = rendered_module(CAUSAL, edit_source=in_pairs)
    for call in (CALLS[0], CALLS[3], CALLS[8]):
        check_cached(module, CAUSAL, call, torch.float16)


@pytest.mark.parametrize("number", [3, 4, 6])
def test_offsets_of_64_bits(number: int) -> None:
    def wide(source: str) -> str:
        narrow = '"WIDE": any('
        assert source.count(narrow) == 1
        return source.replace(narrow, '"WIDE": not any(')

    module = rendered_module(CAUSAL, edit_source=wide)
    check_cached(module, CAUSAL, CALLS[number], torch.float16)


def test_which_caches_need_them() -> None:
    """Offsets are from a sequence's first row on, or with pages from the first page on."""
    is_wide = rendered_module(PLAIN)._is_wide

    def cache(places: int, rows: int) -> torch.Tensor:
        return torch.empty(places, rows, 8, 128, dtype=torch.float16, device="meta")

    most = 2**31 // 1024
    assert not is_wide(cache(5, most - 300), False) and is_wide(cache(1, most - 200), False)
    assert not is_wide(cache(most // 16 - 20, 16), True) and is_wide(cache(most // 16, 16), True)


def test_calls_one_after_another_share_counters() -> None:
    """As in a graph that is replayed: a call leaves the counters as it found them."""
    module = rendered_module(PLAIN)
    counters = torch.zeros(1024, dtype=torch.int32)
    module._cache_counters = lambda device, programs: counters[:programs]
    for call in CALLS[:3]:
        check_cached(module, PLAIN, call, torch.float32)
        assert not counters.any()


def test_an_output_may_be_given() -> None:
    module, call = rendered_module(PLAIN), CacheCall((30, 18), 2)
    given = cached(call, PLAIN, torch.float32)
    out = torch.empty(2, 2, 8, 16)[:, :, ::2]
    with torch.no_grad():
        result, lse = module.cache_attention(**given.arguments, out=out, return_lse=True)
    assert result is out
    hold(out, lse, given, PLAIN, call)
