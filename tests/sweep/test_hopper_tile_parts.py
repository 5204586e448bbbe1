"""The Gluon forward kernel knows what of each 64 keys 64 queries see: nothing, some or all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import pytest

from flashgen import AttentionSpec
from flashgen.config import KernelConfig
from support.data_masks import data_case, data_mask
from support.gluon import interpreted
from support.slip import with_slip
from support.variants import rendered_module
from sweep.hopper import check_hopper

#: One part and two beside each other, with two and three consumers.
CONFIGS = {
    "d128": KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
    "d128_three": KernelConfig(BLOCK_M=192, BLOCK_N=64, num_warps=12, num_stages=2),
    "d64": KernelConfig(BLOCK_M=192, BLOCK_N=128, num_warps=12, num_stages=2),
}

#: Lists that have the last keys, in a part that is whole and in one that is not; and single keys.
CALLS = (("chosen", 320), ("chosen", 330), ("flags", 330))


@functools.cache
def _spec(name: str, way: str) -> AttentionSpec:
    return AttentionSpec(int(way[1:].partition("_")[0]), mask=data_mask(name))


def _check(way: str, name: str, length: int, edit: Callable[[str], str]) -> None:
    spec = _spec(name, way)
    check_hopper(_module(name, way, edit), spec, data_case(name, length), CONFIGS[way])


@functools.cache
def _module(name: str, way: str, edit: Callable[[str], str]) -> ModuleType:
    def edited(source: str) -> str:
        return interpreted(edit(source))

    return rendered_module(_spec(name, way), hopper=True, edit_source=edited)


@functools.cache
def _slip(name: str) -> Callable[[str], str]:
    return with_slip(*SLIPS[name]) if name else lambda source: source


@pytest.mark.parametrize("way", CONFIGS)
def test_visits_whose_parts_are_told(way: str) -> None:
    for name, length in CALLS:
        _check(way, name, length, _slip(""))


SLIPS = {
    "parts_of_the_first_consumer": ("2 * PARTS * NUMBER", "2 * PARTS * 0"),
    "of_the_part_beside": ("gl.where(columns < 64,", "gl.where(columns >= 64,"),
    "no_element_decides": ("(parts ^ parts >> 1) & EVERY_SECOND != 0", "parts < 0"),
    "keys_past_the_end": (
        "tl.where((listed + 1) * TILE <= listed_len, every & some, 0)",
        "every & some",
    ),
    "parts_past_the_end": ("tl.where(begin // TILE + part <= last, some & 1, 0)", "some & 1"),
    "the_row_of_parts_above": ("(own - own_first // TILE) * PARTS", "0 * PARTS"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_does_not_survive(name: str) -> None:
    with pytest.raises(AssertionError):
        for mask, length in CALLS:
            _check("d128", mask, length, _slip(name))
