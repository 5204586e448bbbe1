"""The cache kernel where tiles of keys are decided in each call, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Mask,
    Tensor,
    block_sparse,
    causal,
    document,
    sink_tokens,
    sliding_window,
    softcap,
    softmax,
    tree,
)
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.plan import lower
from support.cached import CacheCall, cached, check_cached, hold
from support.variants import rendered_module
from sweep import test_cache_faults
from sweep.test_cache_mutants import edited

IDS = Tensor("ids", ("batch", "kv_len"), "int32")
KEEP = Tensor("keep", ("batch", "kv_len"), "bool")
GATE = Tensor("gate", ("num_q_heads", None), "bool")
SINKS = Tensor("sinks", ("num_q_heads",))
STARTS = Tensor("starts", ("num_q_heads", "kv_len"), "int32")


def _spec(mask: Mask | Callable[..., Any], **fields: Any) -> AttentionSpec:
    given = {"align": "bottom_right", "forms": ("dense", "cache")} | fields
    return AttentionSpec(given.pop("dims", 16), given.pop("dtype", "float16"), mask=mask, **given)


#: Ids in any order; keys that are kept, with two runs of bounds; blocks that each head chooses,
#: beside the last keys; ids of documents, for which other kernels have tables of ranges; and two
#: runs of bounds, of which one begins where a tensor says for each head and query.
SPECS = {
    "ids": _spec(
        causal() & (lambda b, h, q_idx, kv_idx: IDS[b, q_idx] == IDS[b, kv_idx]), dtype="float32"
    ),
    "kept": _spec(
        (sliding_window(90, 0) | sink_tokens(40)) & (lambda b, h, q_idx, kv_idx: KEEP[b, kv_idx]),
        score=softcap(3.0),
        normaliser=softmax(sink=SINKS),
        dims=(24, 40),
    ),
    "gate": _spec(
        causal() & (lambda b, h, q_idx, kv_idx: GATE[h, kv_idx // 16] | (q_idx - kv_idx < 3))
    ),
    "documents": _spec(document() & causal()),
    "ends": _spec(
        lambda b, h, q_idx, kv_idx: (
            ((kv_idx > STARTS[h, q_idx]) | (kv_idx < 9)) & (kv_idx <= q_idx) & KEEP[b, kv_idx]
        )
    ),
}

#: One query, some, and more than a tile has; rows and pages of each kind of place; 1 to 64 splits;
#: sequences without keys, and without queries.
CALLS = (
    CacheCall((0, 1, 37, 64, 300), num_splits=1),
    CacheCall((15, 16, 17, 200), 3, heads=6, num_splits=3),
    CacheCall((170, 141), 140, heads=2, kv_heads=2, num_splits=2),
    CacheCall((400, 20, 3), 1, heads=16, kv_heads=1, slots=True, num_splits=64),
    CacheCall((0, 33, 170, 19), 2, page_size=16, num_splits=4),
    CacheCall((100, 1, 48), 1, page_size=1, heads=2),
    CacheCall((40, 0, 9, 275), (5, 0, 1, 20), page_size=64, padding=3),
    CacheCall((140, 12, 9, 33), (0, 12, 1, 30), heads=3, kv_heads=1, num_splits=2, padding=2),
    CacheCall((60, 36, 2, 2, 2, 15), num_splits=1),
)


def given(name: str, call: CacheCall) -> CacheCall:
    """The call with what a mask reads: most tiles of 16 keys are hidden."""
    batch, length = len(call.kv_lens), call.capacity
    at, entry = torch.arange(length), torch.arange(batch)[:, None]
    generator = torch.Generator().manual_seed(length)
    ids = (at + 7 * entry) // 23 % 3 if name == "ids" else (at + 7 * entry) // 50
    values: dict[str, Any] = {
        "ids": ids.int(),
        "document_ids": ids.int(),
        "keep": (at // 21 + entry) % 4 == 1,
        "gate": torch.rand(call.heads, -(-length // 16), generator=generator) < 0.2,
        "sinks": torch.randn(call.heads, generator=generator),
        "starts": (at - 30 - 40 * torch.arange(call.heads)[:, None]).int(),
    }
    names = {param.name for param in SPECS[name].params}
    return replace(call, params={k: x for k, x in values.items() if k in names})


def shown(name: str, call: CacheCall, b: int, p: dict[str, Any]) -> torch.Tensor:
    """bool (heads, queries, keys): the mask of a sequence by brute force."""
    q_len, kv_len = call.lengths[b], call.kv_lens[b]
    kv = torch.arange(kv_len)
    q = (torch.arange(q_len) + kv_len - q_len)[:, None]
    head = torch.arange(call.heads)[:, None, None]
    if name == "gate":
        return (kv <= q) & (p["gate"][head, kv // 16] | (q - kv < 3))
    if name == "kept":
        window = ((kv <= q) & (q - kv <= 90)) | (kv < 40)
        return (window & p["keep"][b, kv]).expand(call.heads, q_len, kv_len)
    if name == "ends":
        starts = p["starts"][head, q.clamp_min(0)]
        return (kv <= q) & ((kv > starts) | (kv < 9)) & p["keep"][b, kv]
    ids = p["ids" if name == "ids" else "document_ids"][b]
    there = (q >= 0) & (q < len(ids))
    same = (ids[q.clamp(0, len(ids) - 1)] == ids[kv]) & there
    return ((kv <= q) & same).expand(call.heads, q_len, kv_len)


@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("name", SPECS)
def test_calls(name: str, number: int) -> None:
    spec = SPECS[name]
    check_cached(
        rendered_module(spec), spec, given(name, CALLS[number]), getattr(torch, spec.dtype)
    )


class Recorded:
    """A kernel whose last launch is kept: its arguments and constants, by name."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.given = kernel, dict[str, Any]()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
            return self.kernel[grid](*args, **constants)

        return launch


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a call allocates for integers holds no lists of earlier calls."""
    make = torch.Tensor.new_empty

    def filled(x: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        found = make(x, *shape, **options)
        return found.fill_(1_000_000) if found.dtype == torch.int32 else found

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    yield


@dataclass
class Lists:
    """What a call decides, beside what it should: for each list the visits and the entries."""

    found: list[list[int]]
    right: list[list[int]]


def lists_of(module: ModuleType, name: str, call: CacheCall) -> Lists:
    """The lists of a call's units, and of each head of keys where heads differ."""
    kernel, spec = Recorded(module._cache_attention), SPECS[name]
    module._cache_attention = kernel
    tensors = cached(call, spec, getattr(torch, spec.dtype)).arguments
    with torch.no_grad():
        module.cache_attention(**tensors, num_splits=call.num_splits)
    module._cache_attention = kernel.kernel
    of = kernel.given
    lists, most, block_m, block_n = (of[x] for x in ("num_lists", "most", "BLOCK_M", "BLOCK_N"))
    counts, entries = of["decided_ptr"].split([lists, lists * most])
    found = [
        [n, *row[: max(n, 0)]]
        for n, row in zip(counts.tolist(), entries.view(lists, most).tolist(), strict=True)
    ]
    group, right = call.heads // call.kv_heads, []
    for number in range(lists):
        b = number // of["tiles_of_queries"] % len(call.kv_lens)
        first = number % of["tiles_of_queries"] * block_m
        rows = torch.arange(first, min(first + block_m, call.lengths[b] * group))
        if len(rows) == 0:
            right.append([-1])
            continue
        mask = shown(name, call, b, tensors)
        kv_head = number // of["tiles_of_queries"] // len(call.kv_lens)
        seen = mask[kv_head * group + rows % group, rows // group]
        entries_of_unit = []
        for tile, keys in enumerate(seen.split(block_n, 1)) if seen.shape[1] else ():
            full = bool(keys.all()) and keys.shape[1] == block_n
            entries_of_unit += [2 * tile + 1 - full] if keys.any() else []
        right.append([len(entries_of_unit), *entries_of_unit])
    return Lists(found, right)


@pytest.mark.parametrize("at_once", [2048, 64])
@pytest.mark.parametrize("name", SPECS)
def test_lists_have_the_tiles_that_some_query_sees(
    name: str, at_once: int, garbage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part, or in several; calls one after another share counters, as replays do."""
    module = rendered_module(SPECS[name])
    monkeypatch.setattr(module, "DECIDED_AT_ONCE", at_once)
    counters = torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(module, "_cache_counters", lambda device, programs: counters[:programs])
    for call in CALLS:
        lists = lists_of(module, name, given(name, call))
        assert lists.found == lists.right
        assert not counters.any()


def test_a_list_is_closed_a_piece_at_a_time(garbage: None) -> None:
    """Of many tiles, as a long cache has."""
    module = rendered_module(SPECS["ids"], edit_source=edited("min(1024, max(32", "min(32, max(32"))
    call = given("ids", CacheCall((1300, 700), 1))
    lists = lists_of(module, "ids", call)
    assert lists.found == lists.right and min(map(len, lists.right)) > 12
    check_cached(module, SPECS["ids"], call, torch.float32)


def test_units_of_several_vectors() -> None:
    """Of many units, each vector of them is looked at again for each."""
    few = "sequences = next((n for n in (1, 16, 128) if tiles <= n), 1024)"
    module = rendered_module(SPECS["gate"], edit_source=edited(few, "sequences = 2"))
    for number in (0, 2, 6):
        check_cached(module, SPECS["gate"], given("gate", CALLS[number]), torch.float16)


def test_a_graph_of_equal_calls_is_the_same_to_the_bit() -> None:
    module, call = rendered_module(SPECS["ids"]), given("ids", CALLS[3])
    tensors = cached(call, SPECS["ids"], torch.float32).arguments
    with torch.no_grad():
        first, second = (module.cache_attention(**tensors, num_splits=64) for _ in range(2))
    assert torch.equal(first, second)


#: Pages without a key that a query sees are given back, or are another sequence's.
FREED = CacheCall((190, 17, 64), 2, page_size=16, num_splits=3)


def freed(name: str, page_size: int) -> tuple[CacheCall, Any]:
    """A call, and its tensors, in which every page that no query sees is missing."""
    call, spec = given(name, replace(FREED, page_size=page_size)), SPECS[name]
    tensors = cached(call, spec, getattr(torch, spec.dtype))
    table = tensors.arguments["block_table"]
    for b in range(len(call.kv_lens)):
        pages = shown(name, call, b, tensors.arguments).flatten(0, 1).split(page_size, 1)
        for i, page in enumerate(pages):
            if not page.any() and (i + 1) * page_size <= call.kv_lens[b] - 2:
                tensors.arguments["k_cache"][table[b, i]] = torch.nan
                tensors.arguments["v_cache"][table[b, i]] = torch.nan
                table[b, i] = -1 if i % 2 else table[b, i]
    assert (table[0, : 160 // page_size] == -1).any()
    return call, tensors


def check_freed(module: ModuleType, name: str, page_size: int) -> None:
    """Fails unless such a call is right."""
    call, tensors = freed(name, page_size)
    with torch.no_grad():
        out, lse = module.cache_attention(**tensors.arguments, num_splits=3, return_lse=True)
    hold(out, lse, tensors, SPECS[name], call)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SPECS)
def test_pages_that_no_query_sees_may_be_missing(name: str, page_size: int) -> None:
    check_freed(rendered_module(SPECS[name]), name, page_size)


def test_a_page_that_is_missing_is_a_fault_where_a_query_sees_it() -> None:
    call, tensors = freed("ids", 16)
    seen = shown("ids", call, 0, tensors.arguments).flatten(0, 1).any(0).nonzero()[0].item()
    tensors.arguments["block_table"][0, seen // 16] = 10**6
    with torch.no_grad():
        out = rendered_module(SPECS["ids"]).cache_attention(**tensors.arguments)
    assert out[0].isnan().all() and not out[1:].isnan().any()


#: All of the keys of a short sequence, whose tiles are decided.
STRIPES = _spec(
    causal() & (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 640 < 200), dtype="float32"
)


@pytest.mark.parametrize("fault", test_cache_faults.FAULTS)
def test_a_fault_is_nan_and_changes_no_other_sequence(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_cache_faults, "SPEC", STRIPES)
    assert CachePlan(lower(STRIPES, "stripes")).deciding is not None
    test_cache_faults.test_a_fault_is_nan_and_changes_no_other_sequence(fault)


def test_nothing_to_compute() -> None:
    """No sequence, no page, and no key."""
    module, tensors = rendered_module(STRIPES), cached(FREED, STRIPES, torch.float32).arguments
    none = {name: tensors[name][:0] for name in ("q", "kv_lens", "block_table")}
    packed = {"q": torch.zeros(3, 4, 16), "cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}
    with torch.no_grad():
        assert module.cache_attention(**tensors | none).shape == (0, 2, 4, 16)
        module.cache_attention(**tensors | none | packed, max_q_len=1)
        empty = {name: tensors[name][:0] for name in ("k_cache", "v_cache")}
        zeros = {"kv_lens": torch.zeros(3, dtype=torch.int32)}
        assert not module.cache_attention(**tensors | empty | zeros).any()


#: The defect, and the spec and the number of a call whose lists or results it changes.
DEFECTS: dict[str, tuple[str, str, str, int]] = {
    "no last tile": ("num_visits = tl.minimum(visits, most)",
                     "num_visits = tl.minimum(visits - 1, most)", "ids", 0),
    "a tile that the last query alone sees": ("some |= tl.max(visible", "some = tl.max(visible",
                                              "ids", 2),
    "the first queries alone": ("tl.minimum(q_first + above +", "tl.minimum(q_first +", "ids", 2),
    "the first rows alone": ("tl.minimum(first_row + above +", "tl.minimum(first_row +", "gate", 2),
    "full for the last query": ("every &= tl.min(visible", "every = tl.min(visible", "gate", 2),
    "keys behind the last one": ("(kv_idx[None, :] < kv_len)", "(kv_idx[None, :] <= kv_len)",
                                 "kept", 8),
    "tiles of the next part": ("tl.range(part * CHUNK,", "tl.range((part + 1) * CHUNK,", "ids", 3),
    "a part too few": ("num_visits, num_parts * CHUNK)", "num_visits, (num_parts + 1) * CHUNK)",
                       "ids", 3),
    "listed before the last part": ("arrived == num_parts - 1:\n        tl.store(counters_ptr + nu",
                                    "arrived == 0:\n        tl.store(counters_ptr + nu", "ids", 3),
    "counters as they are": ("tl.store(counters_ptr + number, 0)", "pass", "ids", 0),
    "gaps of a list": ("place = count + tl.cumsum(listed, 0) - 1", "place = visit", "ids", 0),
    "lists of the first head": ("first_list = kv_head * num_units", "first_list = 0", "gate", 0),
    "rows of the first head": ("head = kv_head * group + row_here", "head = row_here", "gate", 0),
    "lists of the next sequence": ("batch = unit // tiles_of_queries\n    first_row",
                                   "batch = (unit // tiles_of_queries + 1) % num_sequences\n"
                                   "    first_row", "ids", 1),
    "lists of the first tile": ("first_row = unit % tiles_of_queries * BLOCK_M\n    _",
                                "first_row = unit * 0\n    _", "ids", 2),
    "rows of the first tile": ("unit = index_of_unit % tiles_of_queries", "unit = 0 * share",
                               "ids", 2),
    "the list before": ("num_lists + (index_of_unit)", "num_lists + (index_of_unit ^ 1)",
                        "documents", 1),
    "the next entry again": ("later = visit + 2", "later = visit + 1", "ids", 0),
    "an entry ahead": ("start_n = next_n\n", "start_n = later_entry // 2 * BLOCK_N\n", "ids", 3),
    "all tiles full": ("masked = next_masked != 0", "masked = next_masked < 0", "kept", 1),
    "the mask of the next tile": ("next_masked = later_entry % 2", "next_masked = entry % 2",
                                  "kept", 8),
    "the page of this visit": ("_pages(places, next_n, kv_len, visit + 1 <",
                               "_pages(places, start_n, kv_len, visit + 1 <", "ids", 6),
    "no work for an empty unit": ("    shares = tl.maximum(tl.cdiv(visits, tiles_of_a_share), 1)",
                                  "    shares = tl.cdiv(visits, tiles_of_a_share)", "ids", 0),
    "a boundary of shares moved": ("unit_end = unit_first + unit_shares",
                                   "unit_end = unit_first + unit_shares + 1", "ids", 3),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str, garbage: None, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, name, number = DEFECTS[defect]
    module = rendered_module(SPECS[name], edit_source=edited(old, new))
    monkeypatch.setattr(module, "DECIDED_AT_ONCE", 64)
    counters = torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(module, "_cache_counters", lambda device, programs: counters[:programs])
    call = given(name, CALLS[number])
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_cached(module, SPECS[name], call, getattr(torch, SPECS[name].dtype))
        lists = lists_of(module, name, call)
        assert lists.found == lists.right
        assert not counters.any()


def test_pieces_of_a_list_that_lie_on_each_other_are_found(garbage: None) -> None:
    def edit(source: str) -> str:
        source = edited("min(1024, max(32", "min(32, max(32")(source)
        return edited("count += tl.sum(listed, 0)", "count = tl.sum(listed, 0)")(source)

    lists = lists_of(
        rendered_module(SPECS["ids"], edit_source=edit), "ids",
        given("ids", CacheCall((1300, 700), 1)),
    )  # fmt: skip
    assert lists.found != lists.right


@pytest.mark.parametrize(
    "old, new",
    [
        ("missing & (shown_here > 0)", "missing"),
        ("v = tl.where(shown_here[:, None] > 0, v, 0.0)", "v = v"),
    ],
)
def test_a_lack_of_care_for_missing_pages_is_found(old: str, new: str) -> None:
    module = rendered_module(SPECS["ids"], edit_source=edited(old, new))
    with pytest.raises(AssertionError):
        check_freed(module, "ids", 1)


MORE = "more queries than the largest number"


def with_more_rows_than_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that fault: the last unit has no row of some queries."""
    call, *fault = test_cache_faults.FAULTS[MORE]
    wide = (replace(call, heads=25, kv_heads=1), *fault)
    monkeypatch.setitem(test_cache_faults.FAULTS, MORE, wide)
    monkeypatch.setattr(test_cache_faults, "SPEC", STRIPES)


def test_rows_behind_the_last_unit_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    with_more_rows_than_units(monkeypatch)
    test_cache_faults.test_a_fault_is_nan_and_changes_no_other_sequence(MORE)


def test_rows_of_too_many_queries_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = edited("last_row = tl.where(long, q_len * group, last_row)", "pass")
    with_more_rows_than_units(monkeypatch)
    monkeypatch.setattr(
        test_cache_faults, "rendered_module", partial(rendered_module, edit_source=edit)
    )
    with pytest.raises(AssertionError):
        test_cache_faults.test_a_fault_is_nan_and_changes_no_other_sequence(MORE)


def test_which_masks_decide_tiles() -> None:
    """Those that bounds, without tables, leave holes in before the queries' own keys."""

    def decides(mask: Any, **fields: Any) -> bool:
        return CachePlan(lower(_spec(mask, **fields), "a")).deciding is not None

    assert decides(document()) and decides(document(IDS)) and decides(block_sparse())
    assert decides(lambda b, h, q_idx, kv_idx: KEEP[b, kv_idx])
    assert not decides(causal()) and not decides(sliding_window(90, 0) | sink_tokens(4))
    assert not decides(tree())
    # Every tile is needed, though bounds are not exact.
    assert not decides(causal() & (lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0))
