"""The sweep of the cache kernel can fail: kernels with one defect each do not pass it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from flashgen import AttentionSpec
from support.cached import check_cached
from support.variants import rendered_module
from sweep import test_cache_faults
from sweep.test_cache import BEHIND, CALLS, CAUSAL, IN_GAPS, PLAIN, TREE, WINDOW

#: The defect, and by the number of a call of `CALLS` the spec and the call that find it.
DEFECTS: dict[str, tuple[str, str, AttentionSpec, int]] = {
    "a boundary of splits moved": (
        "return count // all_shares * shares + count % all_shares * shares // all_shares",
        "return count // all_shares * shares",
        CAUSAL, 2,
    ),
    "a tile with hidden keys among those that hide nothing": (
        "whole_end = tl.minimum(tl.maximum(full_end - first, whole_begin), last_visit)",
        "whole_end = tl.minimum(tl.maximum(full_end - first + 1, whole_begin), last_visit)",
        TREE, 1,
    ),
    "the tiles that hide nothing visited again": (
        "tl.where(visit < whole_begin, 0, whole_visits)",
        "0",
        TREE, 6,
    ),
    "no work for an empty sequence": (
        "return tl.maximum(tl.cdiv(visits, tiles_of_a_share), 1)",
        "return tl.cdiv(visits, tiles_of_a_share)",
        WINDOW, 0,
    ),
    "sums merged without their maxima": (
        "l_i = l_i * alpha + tl.sum(l_part * weight, 0)", "l_i += tl.sum(l_part, 0)", WINDOW, 1,
    ),
    "outputs merged without their maxima": (
        "tl.sum(part * weight[:, :, None], 0)", "tl.sum(part, 0)", WINDOW, 1,
    ),
    "the first part in the wrong slot": (
        "+ tl.where(number == 0, 1, 0)", "+ 0 * number", WINDOW, 1,
    ),
    "a part too few": (
        "num_parts = (unit_end - 1) // own_shares - first_team + 1",
        "num_parts = tl.maximum((unit_end - 1) // own_shares - first_team, 1)",
        WINDOW, 1,
    ),
    "parts of the next head": (
        "2 * (first_program + number * num_kv_heads)", "2 * (first_program + number)", WINDOW, 1,
    ),
    "the last sequence's keys": (
        "kv_len = tl.sum(tl.where(here, kv_lens, 0), 0)", "kv_len = tl.max(kv_lens, 0)", CAUSAL, 1,
    ),
    "merged by none": (
        "if arrived == num_parts - 1:", "if arrived == num_parts:", WINDOW, 1,
    ),
    "the sink in no part": (
        "l_i = l_i * alpha + tl.math.exp2(sink_logit - m_all)", "l_i = l_i * alpha", WINDOW, 1,
    ),
    "heads of another order": (
        "head_rows = kv_head * group + row % group",
        "head_rows = kv_head * group + (group - 1 - row % group)",
        CAUSAL, 1,
    ),
    "sinks of another head": (
        "head = kv_head * group + row % group", "head = kv_head + row % group", WINDOW, 1,
    ),
    "queries of the next tile": (
        "q_first = first_row // group\n        q_last", "q_first = q_len - 1\n        q_last",
        CAUSAL, 2,
    ),
    "the last query not in the tile": (
        "q_last = tl.minimum((first_row + BLOCK_M - 1) // group, q_len - 1)",
        "q_last = q_first",
        CAUSAL, 2,
    ),
    "the page of the first key": (
        "offs_n = start_n + tl.arange(0, BLOCK_N)\n        return tl.load(places + offs_n",
        "offs_n = start_n + tl.arange(0, BLOCK_N)\n        return tl.load(places + 0 * offs_n",
        BEHIND, 5,
    ),
    "the first rows of a larger page": (
        "in_page = (start_n % PAGE_SIZE + tl.arange(0, BLOCK_N)).to(OFFSET)",
        "in_page = tl.arange(0, BLOCK_N).to(OFFSET)",
        CAUSAL, 6,
    ),
    "the page of the tile before": (
        "places, tile * BLOCK_N, kv_len, visit + 1 < last_visit",
        "places, (tile - 1) * BLOCK_N, kv_len, visit + 1 < last_visit",
        CAUSAL, 6,
    ),
    "keys behind the last one": ("held = offs_n < kv_len", "held = offs_n <= kv_len", CAUSAL, 1),
    "a row that is not the sequence's": (
        "place = tl.load(places_ptr + batch)\n                misplaced",
        "place = batch\n                misplaced",
        CAUSAL, 3,
    ),
    "tokens of the first sequence": (
        "return start, tokens,", "return start * 0, tokens,", CAUSAL, 7,
    ),
    "a log-sum-exp of packed tokens in another place": (
        "row_of_lse = (token if PACKED else batch.to(tl.int64) * max_q_len) + offs_m",
        "row_of_lse = (0 * token if PACKED else batch.to(tl.int64) * max_q_len) + offs_m",
        CAUSAL, 7,
    ),
    "earlier parts not rescaled": (
        "acc = acc * alpha[:, None] + tl.sum(part", "acc = acc + tl.sum(part", PLAIN, 3,
    ),
}  # fmt: skip

#: Of defects in what protects from wrong lengths and places, the faults that find them. None may
#: write outside of a tensor, to memory of this process: an end past the tokens is not among them.
UNPROTECTED: dict[str, tuple[str, str, str]] = {
    "a long sequence": ("cut = (keys != kv_len)", "cut = (keys < kv_len)",
                        "a length past the rows"),
    "a negative length": ("cut = (keys != kv_len)", "cut = (keys > kv_len)", "a negative length"),
    "tokens of others": ("in_rows = (offs_m < q_len) & (token + offs_m >= own) & writes",
                         "in_rows = (offs_m < q_len) & writes", "an end before the start"),
    "an end before": ("(start < own) | (stop < start) |", "(stop < start) |",
                      "an end before the start"),
    "a long one": ("cut | long.to(tl.int32)", "cut", "more queries than the largest number"),
    "a first start": ("return fault | ((batch == 0) & (start != 0)), own", "return fault, own",
                      "a first sequence that does not start at 0"),
    "a page": ("wrong_pages |= seen_here & missing", "pass", "a page that was given back"),
    "a row": ("at_fault | misplaced | wrong", "at_fault | wrong",
              "a row that does not exist"),
}  # fmt: skip


def edited(old: str, new: str) -> Callable[[str], str]:
    """Replaces the one place of a text."""

    def edit(source: str) -> str:
        assert source.count(old) == 1, f"{source.count(old)} places: {old}"
        return source.replace(old, new)

    return edit


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    old, new, spec, number = DEFECTS[name]
    module = rendered_module(spec, edit_source=edited(old, new))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_cached(module, spec, CALLS[number], getattr(torch, spec.dtype))


@pytest.mark.parametrize("name", UNPROTECTED)
def test_a_lack_of_protection_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, fault = UNPROTECTED[name]
    monkeypatch.setattr(
        test_cache_faults, "rendered_module", partial(rendered_module, edit_source=edited(old, new))
    )
    with pytest.raises(AssertionError):
        test_cache_faults.test_a_fault_is_nan_and_changes_no_other_sequence(fault)


def test_angles_behind_their_tables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = edited("there = held & (position < num_angles)", "there = held")
    monkeypatch.setattr(
        test_cache_faults, "rendered_module", partial(rendered_module, edit_source=edit)
    )
    with pytest.raises(AssertionError):
        test_cache_faults.test_a_sequence_beyond_the_angles_is_nan(False, False, monkeypatch)


@pytest.mark.parametrize(
    "old, new",
    [
        ("missing & (shown_here > 0)", "missing"),
        ("v = tl.where(shown_here[:, None] > 0, v, 0.0)", "v = v"),
    ],
)
def test_a_lack_of_care_for_pages_in_gaps_is_found(old: str, new: str) -> None:
    spec, call = IN_GAPS[0]
    module = rendered_module(spec, edit_source=edited(old, new))
    with pytest.raises(AssertionError):
        check_cached(module, spec, call, torch.float16)


def test_pages_that_are_freed_too_early_are_found() -> None:
    """Otherwise -1 behind a window would be taken for a fault, or a fault for such a page."""
    old = "seen_here = (offs_n >= begin) & (offs_n < end)"
    module = rendered_module(BEHIND, edit_source=edited(old, "seen_here = offs_n < end"))
    with pytest.raises(AssertionError):
        check_cached(module, BEHIND, CALLS[5], torch.float16)
