"""The Gluon forward kernel knows what of each 64 keys 64 queries see: nothing, some or all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec, Tensor
from flashgen.config import KernelConfig
from support.cases import Case, inputs
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

#: Lists that have the last keys, in a part that is whole and in one that is not; single keys; and
#: elements of keys that the producer hands over.
CALLS = (("chosen", 320), ("chosen", 330), ("flags", 330), ("islands", 330), ("both", 330))


_IMG, _FLAG = Tensor("img", ("batch", "kv_len"), "int32"), Tensor("flag", ("kv_len",), "bool")


def _both(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Two elements of each key, which are read eight columns at a time."""
    near = _FLAG[q] | _FLAG[kv] | (abs(q - kv) <= 200)
    return near & ((kv <= q) | (_IMG[b, q] == _IMG[b, kv]))


@functools.cache
def _spec(name: str, way: str) -> AttentionSpec:
    mask = _both if name == "both" else data_mask(name)
    return AttentionSpec(int(way[1:].partition("_")[0]), mask=mask)


def _case(name: str, length: int) -> Case:
    if name != "both":
        return data_case(name, length)
    flags, islands = (data_case(x, length) for x in ("flags", "islands"))
    return replace(flags, params={"flag": flags.params["flag"], "img": islands.params["img"]})


def _check(
    way: str, name: str, length: int, edit: Callable[[str], str], *, steep: bool = False
) -> None:
    """With `steep` one key's scores are so far above all others that tiles are computed again."""
    spec, case = _spec(name, way), _case(name, length)
    q, k, v = inputs(case, spec, torch.bfloat16)
    if steep:
        k[:, :, length // 3] = 300.0
    check_hopper(_module(name, way, edit), spec, case, CONFIGS[way], (q, k, v))


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


@pytest.mark.parametrize("way", CONFIGS)
def test_tiles_that_are_computed_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module("islands", way, _slip(""))
    tell, told = module._set_overflow, []

    def told_too(number: Any, *others: Any) -> None:
        told.append(int(number))
        tell(number, *others)

    monkeypatch.setattr(module, "_set_overflow", told_too)
    _check(way, "islands", 710, _slip(""), steep=True)
    assert any(told)


#: Of what the producer hands over with keys.
SLIPS_OF_ELEMENTS = {
    "elements_of_another_stage": (
        "_elements(col_img_tiles.index(stage), scores)",
        "_elements(col_img_tiles.index(1 - stage), scores)",
    ),
    "keys_before_their_elements": (
        "mbarrier.init(kv_full.index(i), count=2)",
        "mbarrier.init(kv_full.index(i), count=1)",
    ),
    "free_before_they_are_read": (
        "        m_i, l_i, weights, growing = _first_weights(",
        "        mbarrier.arrive(kv_empty.index(k_stage), count=1)\n"
        "        m_i, l_i, weights, growing = _first_weights(",
    ),
    "elements_without_a_mask_alone": ("if entry % 2 != 0:", "if entry % 2 == 0:"),
    "elements_of_the_next_keys": (
        "+ gl.arange(0, BLOCK_N, layout=LANES)",
        "+ 1 + gl.arange(0, BLOCK_N, layout=LANES)",
    ),
}

SLIPS = {
    "hidden_where_not_all_is_seen": ("& 4**PARTS // 3 == 0)", "& 4**PARTS // 3 * 2 == 0)"),
    "the_visit_before": ("(1 + num_visits - visit)", "(2 + num_visits - visit)"),
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


@pytest.mark.parametrize("name", SLIPS_OF_ELEMENTS)
def test_a_slip_of_elements_does_not_survive(name: str) -> None:
    with pytest.raises(AssertionError):
        _check("d128", "islands", 330, with_slip(*SLIPS_OF_ELEMENTS[name]))


#: Of several elements of each key.
SLIPS_OF_EIGHT = {
    "the_first_eight_again": ("eights.index(eighth)", "eights.index(0)"),
    "eight_of_another_stage": (
        "_eight_elements(col_img_tiles.index(stage), bit, scores)",
        "_eight_elements(col_img_tiles.index(1 - stage), bit, scores)",
    ),
    "elements_of_the_other_table": (
        "col_img = _eight_elements(col_img_tiles",
        "col_img = _eight_elements(col_flag_tiles",
    ),
}


@pytest.mark.parametrize("name", SLIPS_OF_EIGHT)
def test_a_slip_of_eight_elements_does_not_survive(name: str) -> None:
    with pytest.raises(AssertionError):
        _check("d64", "both", 330, with_slip(*SLIPS_OF_EIGHT[name]))


def test_a_tile_is_not_taken_while_another_is_computed_again() -> None:
    slip = with_slip("if (online_max == 0) & (index < num_tiles):", "if index < num_tiles:")
    with pytest.raises(AssertionError):
        _check("d128", "islands", 710, slip, steep=True)
