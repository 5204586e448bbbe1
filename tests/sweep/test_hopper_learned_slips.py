"""Slips in what Gluon kernels sum for learned tensors, and in what they drop: all are found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, additive_bias, sliding_window
from flashgen.plan import lower
from support.cases import Case
from support.contract import check_gradients
from support.gluon import interpreted, start_over
from support.mutants import Mutant
from support.variants import any_hopper, any_hopper_backward, imported, rendered
from sweep.test_hopper_learned import BOTTOM, LIFTS, NEAR, PAIRS, SLOPES, TILTS

SPECS = {
    "learns": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s * SLOPES[h] + TILTS[b, q] + NEAR[h, kv - q + 499],
    ),
    # Tiles of 128 keys have numbers that others lack.
    "by_distance": AttentionSpec(
        64, score=lambda s, b, h, q, kv: s + NEAR[h, kv - q + 499], deterministic=True
    ),
    "one_pass": AttentionSpec(
        64, mask=BOTTOM, score=lambda s, b, h, q, kv: s * SLOPES[h] + NEAR[h, kv - q + 499]
    ),
    # Two sums for each element.
    "twice": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + NEAR[h, kv - q + 499] + s.tanh() * NEAR[h, q - kv + 499],
    ),
    "pairs": AttentionSpec(
        64, "float16", mask=BOTTOM, score=additive_bias(PAIRS), deterministic=True
    ),
    # Their gradients are stored by the single pass, and tiles of them loaded.
    "stored_pairs": AttentionSpec(64, mask=BOTTOM, score=additive_bias(PAIRS)),
    "tiles_in_ds": AttentionSpec(
        128, mask=sliding_window(40, 30, align="bottom_right"), score=additive_bias(PAIRS)
    ),
    "roles": AttentionSpec(
        192, mask=BOTTOM, score=lambda s, b, h, q, kv: s * (2 - h) + LIFTS[b, kv] * (1 + h)
    ),
    "drops": AttentionSpec(64, mask=BOTTOM, dropout=True, deterministic=True),
    "wide_drops": AttentionSpec(
        192, mask=BOTTOM, score=lambda s, b, h, q, kv: s * (h - 2), dropout=True
    ),
}

#: For each variant the function, the text that stands there, and what stands there instead.
SLIPS = [
    ("by_distance", "_diagonals_of_warps", "pair = before + after", "pair = before"),
    ("by_distance", "_diagonals_of_warps", "(bit_0 == 0) & (q == 0)", "q == 0"),
    ("by_distance", "_diagonals_of_warps", "3 * (1 - bit_0)", "3"),
    ("by_distance", "_diagonals_of_warps", "(bit_1 == 1) & (q == 3)", "bit_1 == 2"),
    ("by_distance", "_diagonals_of_warps", "gl.where(bit_1 == 1, 1, 3)", "1"),
    ("by_distance", "_diagonals_of_warps", "& (turned >= 2) & (bit_1 == 1)", "& (bit_1 == 1)"),
    ("by_distance", "_diagonals_of_warps", "later = 3 - warp", "later = 0 * warp"),
    ("by_distance", "_diagonals_of_warps", "(later & 1)", "0"),
    ("by_distance", "_diagonals_of_warps", "moved == 2", "moved == 3"),
    ("by_distance", "_diagonals_of_warps", "(to_q - to_1) & 3", "to_q"),
    ("by_distance", "_add_diagonals", "x.shape[1] + 63", "x.shape[1] + 47"),
    ("by_distance", "_number_in_lane", "(turned >> 2)", "0"),
    ("by_distance", "_add_diagonals", "32 * (first", "16 * (first"),
    ("learns", "_learn_of_queries", "NUMBER * _numbers_of_strip", "0 * _numbers_of_strip"),
    ("learns", "_learn_of_queries", ") + start_n", ")"),
    ("learns", "_learn_of_queries", "totals[0] + ", ""),
    ("learns", "_learn_of_queries", "totals[1] + ", ""),
    ("learns", "_learn_of_queries", "ds * partial_of_total_1", "ds"),
    ("learns", "_backward_queries_hopper", "batch_head * num_tiles + tile_m", "tile_m"),
    ("learns", "_backward_queries_hopper", "tile_m += first_tile", "pass"),
    ("learns", "_queries_consumer", "// num_tiles * rows_len", "* BLOCK_M"),
    ("learns", "_queries_consumer", "totals[1], 2)", "totals[0], 2)"),
    ("learns", "_sum_strips", "64 - q_len", "63 - q_len"),
    ("learns", "_sum_strips", "2 * first_tile", "first_tile"),
    ("learns", "_sum_strips", "head * (2 * num_tiles)", "head * num_tiles"),
    ("learns", "_sum_strips", "tl.load(sums_ptr, mask=inside, other=0.0) + ", ""),
    ("one_pass", "_add_diagonals", "last + 15", "last + 16"),
    ("one_pass", "_add_diagonals", "16 * warp", "0 * warp"),
    ("one_pass", "_add_diagonals", "place >= 32 * i", "place >= 0"),
    ("one_pass", "_add_learned", "+ 64 * NUMBER", ""),
    ("one_pass", "_add_learned", "+ q_len - 1", "+ q_len"),
    ("one_pass", "_add_learned", "ds * partial_of_total_1", "ds"),
    ("one_pass", "_backward_scores", "+ 64 * NUMBER", ""),
    ("one_pass", "_terms_of_distance", "first - (of_lane", "first + (of_lane"),
    ("one_pass", "_diagonals_from", "16 * warp", "0 * warp"),
    ("one_pass", "_of_diagonals", "values[i + 1].reshape", "values[i].reshape"),
    ("one_pass", "_find_elements_2d", "place * size_1 + index", "place + index"),
    ("twice", "_sum_elements", "before + tl.sum", "tl.sum"),
    ("one_pass", "_sum_elements", "left &= blocks > block", "left &= blocks > block + 1"),
    ("pairs", "_put_at_4d_hopper", "place * size_3", "place * size_2"),
    ("pairs", "_learn_of_queries", "pairs_tiles.index(NUMBER)", "pairs_tiles.index(0)"),
    ("pairs", "_learn_of_queries", "(start_n + ", "(0 * start_n + "),
    ("stored_pairs", "_add_learned", "+ 64 * NUMBER", ""),
    ("stored_pairs", "_store_pairs", ".permute((1, 0))", ""),
    ("stored_pairs", "_backward_step", "2 * stage + NUMBER", "2 * stage"),
    ("stored_pairs", "_backward_producer", "kv_first + 64 * i", "kv_first"),
    ("stored_pairs", "_clear_pairs", "head_row + ", ""),
    ("tiles_in_ds", "_clear_pairs", "numbers < q_begin", "numbers < 0"),
    ("tiles_in_ds", "_backward_producer", "(visit + 1) * step", "visit * step"),
    ("tiles_in_ds", "_backward_step", "mbarrier.arrive(pairs_empty.index(stage), count=1)", "pass"),
    ("tiles_in_ds", "_backward_step", "mbarrier.wait(pairs_full.index(stage), phase)", "pass"),
    ("roles", "_keys_step", "ds * head_scale", "ds"),
    ("roles", "_keys_step", "factors * (dp - delta[None, :])", "factors * dp"),
    ("roles", "_add_learned", "totals[0] + ", ""),
    ("drops", "_mark_dropped_keys", "start_n // 4", "start_n // 8"),
    ("drops", "_mark_dropped_keys", "q_first // 2", "0 * q_first"),
    ("drops", "_queries_step", "dp * kept_scale", "dp"),
    ("drops", "_queries_step", "gl.abs(p) * delta", "p * delta"),
    ("wide_drops", "_keys_step", "ds * head_scale", "ds"),
    ("wide_drops", "_values_consumer", "grad_v[0] * kept_scale", "grad_v[0]"),
]


#: One sequence shows most slips, in half the time that two take.
BATCHES = (1, 2)


@functools.cache
def _source(name: str) -> str:
    plan = lower(SPECS[name], name)
    return rendered(plan, any_hopper(plan), any_hopper_backward(plan))


@pytest.fixture(autouse=True)
def nothing_is_zero_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher leaves to a kernel to write is NaN until then."""
    make = torch.Tensor.new_empty

    def poisoned(*given: Any, **options: Any) -> torch.Tensor:
        made = make(*given, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def _check(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile of queries has a launch, if what they sum takes several."""
    module = imported(name, interpreted(source))
    monkeypatch.setattr(module, "SUMS_AT_ONCE", 1, raising=False)
    params = {"dropout_p": 0.3} if SPECS[name].dropout else {}
    for batch in BATCHES:
        start_over()
        check_gradients(module, SPECS[name], Case(200, 300, batch, 2, 1, params=params))


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: " ".join(slip[1:]))
def test_slips_are_found(slip: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, function, right, wrong = slip
    mutant = Mutant(wrong, "backward_hopper", name, function, right, wrong)
    source = mutant.edited(_source(name))
    with pytest.raises(AssertionError):
        _check(name, source, monkeypatch)


@pytest.mark.parametrize("name", SPECS)
def test_without_a_slip(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls are right."""
    _check(name, _source(name), monkeypatch)
