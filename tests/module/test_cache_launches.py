"""Which kernel computes a call of the cache form, and launches that are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec
from flashgen.forms.cache import serves_gluon
from flashgen.forms.many_queries import Call, fills
from flashgen.plan import lower
from support.cached import FORMS, PAGES, SPEC, CacheCall, cached
from support.fake_gpu import fake_gpu, module_on, named
from support.slip import with_slip
from support.specialised import NUM_SMS
from support.variants import rendered_module

pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


def test_a_kept_launch_is_of_no_call_with_one_more_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call with its key would not be checked."""
    module, keys = rendered_module(SPEC), []
    monkeypatch.setattr(module, "_cache_key", lambda *given: (keys.append(given[2:]), None))
    arguments = cached(PAGES, SPEC, torch.float32).arguments
    with torch.no_grad():
        module.cache_attention(**arguments)
        with pytest.raises(ValueError, match="cache_slots: there is a block_table too"):
            module.cache_attention(**arguments, cache_slots=arguments["kv_lens"])
    assert keys[0] != keys[1]


def test_each_call_of_a_graph_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of graphs that are captured one after another, each after an eager call, none lacks any."""
    module = rendered_module(SPEC)
    gpu, captured = torch.device("cuda", 0), []
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(module, "_kept_zeros", lambda shape, device: torch.zeros(shape))
    monkeypatch.setattr(module, "_counters_of", lambda device, stream: torch.zeros(1024))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 0))
    monkeypatch.setattr(module.triton.runtime, "driver", driver)
    for calls in (500, 400, 512):
        capturing[0] = False
        module._cache_counters(gpu, 132)
        capturing[0] = True
        captured += [module._cache_counters(gpu, 132) for _ in range(calls)]
    assert len({x.data_ptr() for x in captured}) == len(captured)
    assert all(len(x) == 1024 for x in captured)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_repeated_launches_of_many_queries(
    num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass what ordinary ones pass: of other tensors, another scale, and other slopes."""
    merged = () if num_splits == 1 else ("_merge_cache_splits",)
    gpu = fake_gpu(monkeypatch)
    spec = AttentionSpec(
        64, "float16", mask=SPEC.mask, score=SPEC.score, forms=FORMS
    )  # with a tensor
    module = module_on(gpu, spec, monkeypatch)
    call = CacheCall((300, 280), 200, heads=32, kv_heads=8, page_size=16)

    def noted(scale: float) -> Any:
        given = cached(call, spec, torch.float16).arguments
        given["out"] = torch.empty_like(given["q"])
        before = len(gpu.calls)
        with torch.no_grad():
            module.cache_attention(**given, num_splits=num_splits, scale=scale)
        names = {x.data_ptr(): n for n, x in given.items() if isinstance(x, torch.Tensor)}
        return named(tuple(gpu.calls[before:]), names), given

    first, kept_alive = noted(0.5)
    assert [x[4] for x in first] == [
        f"function {name}" for name in ("_list_cache_tiles", "_attention_hopper_cached", *merged)
    ]
    assert len(module._LAUNCHES) == 1
    repeated, others = noted(0.25)
    module._LAUNCHES.clear()
    ordinary, _ = noted(0.25)
    assert repeated == ordinary != first
    assert kept_alive is not others


#: Sequences, queries of each, and keys that a cache can hold, of 32 heads over 8, and whether the
#: Gluon kernel computes them with 132 SMs: (33, 16) fills half of the rows of two rounds, and of
#: full tiles 2^25 pairs are worth dividing.
CHOICES = {
    (33, 16, 1024): True,
    (34, 16, 1024): False,
    (1, 32, 32_768): True,
    (1, 32, 32_704): False,
    (1, 31, 65_536): False,
    (66, 32, 64): True,
    (8, 1, 65_536): False,
}
#: What each line of the choice would be if it were wrong.
WRONG_CHOICES = {
    "half is too few": ("if computed > 2 * rows", "if computed >= 2 * rows"),
    "all rows": ("if computed > 2 * rows", "if computed > rows"),
    "rounds begun": ("computed = triton.cdiv(tiles, programs)", "computed = (tiles // programs)"),
    "full tiles are too few": ("of_sequence < FULL_ROWS", "of_sequence <= FULL_ROWS"),
    "any tiles": ("of_sequence < FULL_ROWS or ", ""),
    "pairs": ("rows * keys < LEAST_PAIRS", "rows * keys <= LEAST_PAIRS"),
    "any pairs": (" or rows * keys < LEAST_PAIRS", ""),
    "pages": ("keys *= places.shape[1]", "keys *= 1"),
    "no rows": ("LEAST_ROWS * batch:", "0:"),
}


def _choices(module: Any) -> dict[tuple[int, int, int, str], bool]:
    """Which calls run the Gluon kernel, in rows, in pages and packed."""
    found = {}
    for (batch, q_len, capacity), _ in CHOICES.items():
        q = torch.empty(batch, q_len, 32, 64, dtype=torch.float16)
        lens = torch.empty(batch, dtype=torch.int32)
        ends = torch.empty(batch + 1, dtype=torch.int32)
        rows = torch.empty(batch, capacity, 8, 64, dtype=torch.float16)
        pages = rows.view(-1, 64, 8, 64)
        table = torch.empty(batch, capacity // 64, dtype=torch.int32)
        calls = {"rows": (q, rows, None, None), "pages": (q, pages, None, table)}
        calls["packed"] = (q.flatten(0, 1), rows, ends, None)
        for name, (given, cache, cu_seqlens, places) in calls.items():
            of_call = (given, cache, cache, lens, cu_seqlens, places, given)
            found[batch, q_len, capacity, name] = module._runs_cache_hopper(*of_call)
    # Of fewer tokens than sequences.
    q, lens = torch.empty(2, 32, 64, dtype=torch.float16), torch.empty(16, dtype=torch.int32)
    rows = torch.empty(16, 64, 8, 64, dtype=torch.float16)
    of_call = (q, rows, rows, lens, torch.empty(17, dtype=torch.int32), None, q)
    found[16, 0, 64, "packed"] = module._runs_cache_hopper(*of_call)
    return found


def test_which_kernel_computes_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes alone; `flashgen explain` says the same, and no slip passes."""
    spec = AttentionSpec(64, "float16", mask=SPEC.mask, forms=FORMS)
    gpu = fake_gpu(monkeypatch)
    module = module_on(gpu, spec, monkeypatch)
    right = {(*call, name): runs for call, runs in CHOICES.items()
             for name in ("rows", "pages", "packed")} | {(16, 0, 64, "packed"): False}  # fmt: skip
    assert _choices(module) == right
    plan = lower(spec, "x")
    for batch, q_len, capacity, name in list(right)[:-1]:
        page_size = 64 if name == "pages" else 0
        call = Call(batch, q_len, 32, 8, capacity, page_size, NUM_SMS)
        runs = serves_gluon(plan, call) and fills(plan, call)
        assert runs == right[batch, q_len, capacity, name]
    for name, (line, wrong) in WRONG_CHOICES.items():
        slipped = module_on(gpu, spec, monkeypatch, edit_source=with_slip(line, wrong))
        assert _choices(slipped) != right, name


APPENDS = {
    "rows": {},
    "rotated": {"angles": True},
    "GPT-J": {"angles": True, "interleaved": True},
    "queries": {"angles": True, "q": True},
    "pages": {"paged": True},
    "places": {"slots": True},
    "packed": {"packed": True, "angles": True, "q": True},
}


def _appended(
    *,
    angles: bool = False,
    interleaved: bool = False,
    q: bool = False,
    paged: bool = False,
    slots: bool = False,
    packed: bool = False,
) -> dict[str, Any]:
    """Arguments of `append` at addresses of their own: two tokens of each of three sequences."""
    new = (6, 2, 16) if packed else (3, 2, 2, 16)
    given: dict[str, Any] = {"k_new": torch.zeros(new), "v_new": torch.zeros(new)}
    given |= {name: torch.zeros(3, 32, 2, 16) for name in ("k_cache", "v_cache")}
    given["kv_lens"] = torch.full((3,), 9, dtype=torch.int32)
    if angles:
        given |= {name: torch.zeros(40, 4) for name in ("rotary_cos", "rotary_sin")}
        given["interleaved"] = interleaved
    if q:
        given["q"] = torch.zeros((*new[:-2], 4, 16))
    if paged:
        given["block_table"] = torch.zeros(3, 2, dtype=torch.int32)
    if slots:
        given["cache_slots"] = torch.zeros(3, dtype=torch.int32)
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    return given


def test_repeated_launches_of_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass what ordinary ones pass, and calls that differ have launches of their own."""
    gpu = fake_gpu(monkeypatch)
    module = module_on(gpu, SPEC, monkeypatch)

    def noted(given: dict[str, Any]) -> Any:
        before = len(gpu.calls)
        with torch.no_grad():
            turned = module.append(**given)
        assert (turned is None) == ("q" not in given)
        names = {x.data_ptr(): n for n, x in given.items() if isinstance(x, torch.Tensor)}
        return named(tuple(gpu.calls[before:]), names)

    for number, (name, options) in enumerate(APPENDS.items()):
        held = [_appended(**options) for _ in range(3)]
        first, bound = noted(held[0]), gpu.binds
        assert len(module._LAUNCHES) == number + 1, name
        assert [x[4] for x in first] == ["function _append_rows"]
        assert noted(held[1]) == first, name
        assert gpu.binds == bound, "Triton prepared a launch anew"
        kept = dict(module._LAUNCHES)
        module._LAUNCHES.clear()
        assert noted(held[2]) == first, name
        module._LAUNCHES.update(kept)


def test_appended_rows_that_are_copied_keep_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of which a view has no rows are copied: a repeated launch would read their memory."""
    module = module_on(fake_gpu(monkeypatch), SPEC, monkeypatch)
    with torch.no_grad():
        for name in ("k_new", "v_new", "q"):
            given = _appended(angles=True, q=True)
            given[name] = torch.zeros(2, 3, *given[name].shape[2:]).transpose(0, 1)
            module.append(**given)
            assert not module._LAUNCHES, name


def test_a_kept_append_is_of_no_call_that_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_on(fake_gpu(monkeypatch), SPEC, monkeypatch)
    given = _appended(angles=True, q=True, paged=True)
    expanded = given["k_cache"][:1].expand_as(given["k_cache"])
    with torch.no_grad():
        module.append(**given)
        assert module._LAUNCHES
        for change, message in (
            ({"cache_slots": given["kv_lens"]}, "cache_slots: there is a block_table too"),
            ({"rotary_sin": None}, "rotary_sin: pass both"),
            ({"rotary_cos": None, "rotary_sin": None}, "q: is rotated by rotary_cos"),
            ({"kv_lens": given["kv_lens"].long()}, "kv_lens: got torch.int64"),
            ({"k_cache": expanded}, "k_cache: is expanded"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                module.append(**given | change)
    with pytest.raises(RuntimeError, match="no gradients through a cache: call append under"):
        module.append(**given | {"q": given["q"].clone().requires_grad_()})
