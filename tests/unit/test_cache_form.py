"""The cache form: which specs have it, and which configurations its kernel has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen import AttentionSpec, Tensor, causal, full, sliding_window, tree
from flashgen.budget.targets import TARGETS, get_target
from flashgen.config import HOPPER, ChosenConfig, KernelChoice, KernelConfig
from flashgen.forms.many_queries import keys_of_tile, names
from flashgen.kernels.cache_triton.plan import CachePlan
from flashgen.kernels.cache_triton.rank import rank_cache
from flashgen.kernels.cache_triton.shared_memory import (
    ENOUGH,
    bytes_ahead,
    programs_of_an_sm,
)
from flashgen.kernels.cache_triton.space import MANY_ROWS, cache_space, for_many_rows
from flashgen.kernels.registry import kernels_of
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.validate import validate
from support.vocabulary import VOCABULARY

BOTTOM = causal(align="bottom_right")
SPEC = AttentionSpec(128, mask=BOTTOM, forms=("dense", "cache"))


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary_has_no_name_that_only_a_cache_module_uses(name: str) -> None:
    dense, cache = (
        validate(Variant(name, VOCABULARY[name].spec("bfloat16", 64, forms=forms), ""))
        for forms in (("dense",), ("dense", "cache"))
    )
    assert dense == cache


def test_keys_of_the_last_tile_of_many_queries() -> None:
    """A window's by its bounds, all that a cache can hold without one."""
    window = lower(AttentionSpec(128, mask=sliding_window(1000, 0, align="bottom_right")), "w")
    text = keys_of_tile(window, rows=192)
    assert eval(text, {"q_len": 300, "capacity": 65_536}) == 1000 + 192
    assert eval(text, {"q_len": 70, "capacity": 500}) == 500
    assert keys_of_tile(lower(SPEC, "c"), rows=192) == ""


@pytest.mark.parametrize(
    ("head_dim", "first", "tiles"),
    [
        (128, (192, 64, 4), ((192, 64, 4, 192), (128, 128, 2, 141))),
        (64, (192, 128, 4), ((192, 128, 4, 192), (128, 128, 4, 147))),
        (128, (128, 64, 2), ((128, 64, 2, 128),)),
        (256, (128, 64, 2), ((128, 64, 2, 128),)),
    ],
)
def test_tiles_of_many_queries(
    head_dim: int, first: tuple[int, int, int], tiles: tuple[tuple[int, ...], ...]
) -> None:
    """The dense kernel's, and of three consumers those that two have registers for."""
    plan = lower(AttentionSpec(head_dim, mask=BOTTOM, forms=SPEC.forms), "c")
    rows, keys, stages = first
    config = KernelConfig(rows, keys, rows // 16, stages)
    choice = KernelChoice({HOPPER: ChosenConfig(config, "model", 0)})
    assert names(plan, choice)["cache_tiles"] == tiles


def test_of_which_masks_the_last_query_sees_all_keys() -> None:
    """Of others a page may have been given back, or was never there."""
    seen = {
        BOTTOM: True,
        full(): True,
        causal(align="top_left"): False,
        sliding_window(1000, 0, align="bottom_right"): False,
        BOTTOM & ~sliding_window(4, 0, align="bottom_right"): False,
        tree(): True,  # but for other drafts, among the last q_len keys
    }
    for mask, all_keys in seen.items():
        plan = lower(AttentionSpec(128, mask=mask, forms=SPEC.forms), "c")
        assert CachePlan(plan).sees_all_keys == all_keys, mask


def test_only_a_spec_with_the_form_has_the_kernel() -> None:
    assert "cached" in kernels_of(lower(SPEC, "a"))
    assert "cached" not in kernels_of(lower(replace(SPEC, forms=("dense",)), "b"))


def test_a_form_changes_no_other_kernel() -> None:
    one, other = (lower(replace(SPEC, forms=forms), "a") for forms in (("dense",), SPEC.forms))
    for key, kernel in kernels_of(one).items():
        assert kernel.digest(one) == kernels_of(other)[key].digest(other)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512, (192, 128), (576, 512)])
def test_what_a_module_ships(head_dim: int | tuple[int, int], target: str) -> None:
    """As many bytes on their way as help, if any candidate has them; many rows where they fit."""
    plan, architecture = lower(replace(SPEC, head_dim=head_dim), "a"), get_target(target)

    def ahead(config: KernelConfig) -> int:
        programs = programs_of_an_sm(plan, config, architecture)
        return min(ENOUGH, programs * bytes_ahead(plan, config))

    candidates = cache_space(plan, target).candidates
    best = rank_cache(plan, target, candidates)[0]
    assert ahead(best) == max(map(ahead, candidates))
    many = for_many_rows(plan, best, architecture)
    assert many.BLOCK_M in MANY_ROWS or max(plan.qk_head_dim, plan.v_head_dim) > 256


def test_tiles_are_counted_for_many_sequences_where_their_bounds_are_numbers() -> None:
    def counted(**fields: object) -> bool:
        return CachePlan(lower(replace(SPEC, **fields), "a")).counts_tiles

    window = sliding_window(1024, 0, align="bottom_right")
    assert counted() and counted(mask=window) and counted(mask=tree())
    by_head = Tensor("left", ("num_q_heads",), "int32")
    assert not counted(mask=sliding_window(by_head, 0, align="bottom_right"))
