"""Masks that only the data knows: the Gluon kernels of both passes, which go by lists."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from support.data_masks import DATA_MASKS, data_case, data_mask
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import first_on_hopper, rendered_module
from sweep.hopper import check_hopper, check_hopper_backward, gradients_survive

#: One pass, two kernels of narrow heads, and two of wide ones: (head dim, deterministic).
WAYS = {"d64": (64, False), "d128": (128, False), "d64_twice": (64, True), "d192": (192, False)}


@functools.cache
def _spec(name: str, way: str) -> AttentionSpec:
    head_dim, deterministic = WAYS[way]
    return AttentionSpec(head_dim, mask=data_mask(name), deterministic=deterministic)


@functools.cache
def _module(name: str, way: str) -> ModuleType:
    return rendered_module(_spec(name, way), hopper=True, edit_source=interpreted)


@pytest.mark.parametrize(("name", "way"), in_turns(DATA_MASKS, WAYS, every=4))
def test_both_passes(name: str, way: str) -> None:
    spec, module = _spec(name, way), _module(name, way)
    case = data_case(name, 330)
    check_hopper(module, spec, case, first_on_hopper(spec))
    if name != "heat":  # whose gradient is that of a mask: there is none
        check_hopper_backward(module, spec, case)


@pytest.mark.parametrize("way", ["d64", "d128"])
def test_three_consumers(way: str) -> None:
    """Which masks that load nothing by key have room for."""
    config = KernelConfig(BLOCK_M=192, BLOCK_N=64, num_warps=12, num_stages=2)
    spec, module = _spec("islands", way), _module("islands", way)
    check_hopper(module, spec, data_case("islands", 450), config)


#: What makes the Gluon kernels and their launchers wrong.
EDITS = {
    "the_count_as_a_tile": ("listed_ptr + 2 + visit", "listed_ptr + 1 + visit"),
    "the_same_tile_again": ("_query_tile(visit + 1, runs)", "_query_tile(visit, runs)"),
    "never_masked": (
        "for visit in range(unmasked, visits):",
        "for visit in range(0):",
    ),
    "all_unmasked": ("unmasked = gl.load(listed_ptr + 1)", "unmasked = num_visits"),
    "another_entry": ("listed = batch * num_tiles_n", "listed = 0 * num_tiles_n"),
    "not_turned": ("tiles = _turned(q, kv_len", "tiles = _listed(q, kv_len"),
}


def _survives(edit: tuple[str, str] | None) -> bool:
    return gradients_survive(edit, _spec("islands", "d64"), [data_case("islands", 330, batch=2)])


@pytest.mark.parametrize("name", EDITS)
def test_mutants_do_not_survive(name: str) -> None:
    assert not _survives(EDITS[name])


def test_without_an_edit_it_is_right() -> None:
    assert _survives(None)
