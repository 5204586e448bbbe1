"""Masks whose bounds are too wide: the kernels that decide and list tiles, and what visits them."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec
from support.bits import with_bits
from support.cases import Case, inputs
from support.data_masks import DATA_MASKS, data_case, data_mask, shown
from support.decided import TILE, check_bits, check_lists, tiles_of
from support.turns import in_turns
from support.variants import lowered, rendered_module
from sweep.backward import check_backward
from sweep.launch import check_kernel


@functools.cache
def _spec(name: str) -> AttentionSpec:
    return AttentionSpec(16, "float32", mask=data_mask(name))


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(_spec(name))


def _bits(module: ModuleType, name: str, case: Case) -> torch.Tensor:
    q, k, _ = inputs(case, _spec(name), torch.float32)
    return with_bits(module, _spec(name), q, k, case.arguments(_spec(name)))[-1]


def _visible(module: ModuleType, name: str, case: Case) -> torch.Tensor:
    """With an entry for each list of the module alone."""
    listing = lowered(_spec(name)).listing
    assert listing is not None
    visible = shown(name, case)
    visible = visible if listing.by_batch else visible[:1]
    return visible if listing.by_head else visible[:, :1]


def _check_bits(module: ModuleType, name: str, case: Case) -> None:
    check_bits(_bits(module, name, case), _visible(module, name, case))


@pytest.mark.parametrize("name", DATA_MASKS)
def test_each_tile_is_decided_exactly(name: str) -> None:
    case = data_case(name, 500, batch=2)
    some, every = tiles_of(_visible(_module(name), name, case), TILE, TILE)
    assert not some.all() or name in ("heat", "hues")
    assert (some & ~every).any() or name == "chosen"
    _check_bits(_module(name), name, case)


def test_more_tiles_than_a_word_holds() -> None:
    _check_bits(_module("padding"), "padding", data_case("padding", 33 * TILE + 5))


def _check_lists(module: ModuleType, name: str, case: Case, block_m: int, block_n: int) -> None:
    q, _, _ = inputs(case, _spec(name), torch.float32)
    bits, visible = _bits(module, name, case), _visible(module, name, case)
    check_lists(module, q, bits, visible, block_m, block_n)


SIZES = ((64, 64), (128, 64), (192, 128), (32, 16), (96, 80))


@pytest.mark.parametrize(("name", "m", "n"), in_turns(["flags", "gate", "padding"], SIZES, every=3))
def test_lists_hold_the_tiles_of_any_size(name: str, m: int, n: int) -> None:
    _check_lists(_module(name), name, data_case(name, 500), m, n)


def test_more_tiles_than_are_listed_at_a_time() -> None:
    _check_lists(_module("padding"), "padding", data_case("padding", 130 * 16), 16, 16)


CALLS = ((75, 32, 16), (150, 16, 64), (130, 64, 32))


@pytest.mark.parametrize(
    ("name", "length", "block_m", "block_n"), in_turns(DATA_MASKS, CALLS, every=3)
)
def test_kernels(name: str, length: int, block_m: int, block_n: int) -> None:
    case = data_case(name, length, batch=2)
    check_kernel(_module(name), _spec(name), case, BLOCK_M=block_m, BLOCK_N=block_n)
    if name != "heat":  # whose gradient is that of a mask: there is none
        check_backward(_module(name), _spec(name), case, BLOCK_M=block_m, BLOCK_N=block_n)


def test_hidden_tiles_are_not_visited() -> None:
    """Keys and values that no query of a tile sees can be NaN: nobody reads them."""
    name, length = "flags", 256
    case = data_case(name, length)
    case.params["flag"].zero_()
    spec, module = _spec(name), _module(name)
    q, k, v = (x.clone() for x in inputs(case, spec, torch.float32))
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "USE_TMA": False}
    given = with_bits(module, spec, q, k, case.arguments(spec))
    clean = module._launch(q, k, v, 0.25, *given, config)
    k[:, :, 192:], v[:, :, 192:] = torch.nan, torch.nan
    poisoned = module._launch(q, k, v, 0.25, *given, config)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a[:, :, :128], b[:, :, :128])


#: What makes the kernel that decides tiles wrong, for the mask that shows it.
DECIDED_WRONGLY = {
    "some_are_all": ("flags", "some_of_keys_0 = tl.max(", "some_of_keys_0 = tl.min("),
    "all_are_some": ("flags", "every_of_keys_0 = tl.min(", "every_of_keys_0 = tl.max("),
    "the_first_key_alone": ("padding", "+ tl.arange(0, TILE)[None, :]", "+ 0 * tl.arange(0, TILE)"),
    "past_the_last_key": (
        "padding",
        "kv_last = tl.minimum(kv_first + TILE, kv_len) - 1",
        "kv_last = kv_first - 1",
    ),
    "no_open_tile": ("islands", "(open_bits >> i) & 1 != 0:", "(open_bits >> i) & 1 == -7:"),
    "one_open_tile": ("islands", "tl.range(0, 8):", "tl.range(0, 1):"),
    "another_tile": ("islands", "start_n = (first_tile + i) * TILE", "start_n = first_tile * TILE"),
    "full_if_nearly": ("heat", "count == TILE * TILE", "count > TILE"),
    "another_head": ("gate", "head = pid // num_words // num_tiles_m", "head = 0"),
    "another_batch_entry": ("padding", "batch = pid // num_words // num_tiles_m", "batch = 0"),
    "the_rows_of_another": ("gate", "tile_m = pid // num_words % num_tiles_m", "tile_m = 0"),
}

LISTED_WRONGLY = {
    "one_row": ("own_last // TILE + 1)", "own_first // TILE + 1)"),
    "one_part": ("begin // TILE + part, last", "begin // TILE, last"),
    "full_past_the_end": ("full = begin + LISTED <= listed_len", "full = begin < listed_len"),
    "keys_past_the_end": ("full &= own_end <= own_len", "full &= own_end > 0"),
    "starts_over": ("count += tl.sum(visited, 0)", "count = tl.sum(visited, 0)"),
    "the_masked_first": ("(full ^ masked) & 1", "(full ^ masked ^ 1) & 1"),
    "not_turned": ("row, column = listed, own", "row, column = own, listed"),
    "another_head": ("tl.cast(pid // num_own, tl.int64)", "tl.cast(0, tl.int64)"),
}


def _edited(name: str, old: str, new: str) -> ModuleType:
    def edit(source: str) -> str:
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in the kernels: {old}")
        return source.replace(old, new).replace("CHUNK=128", "CHUNK=4")

    return rendered_module(_spec(name), edit_source=edit)


@pytest.mark.parametrize("edit", DECIDED_WRONGLY)
def test_what_decides_wrongly_is_found(edit: str) -> None:
    name, old, new = DECIDED_WRONGLY[edit]
    with pytest.raises(AssertionError):
        _check_bits(_edited(name, old, new), name, data_case(name, 300, batch=2))


@pytest.mark.parametrize("edit", LISTED_WRONGLY)
def test_what_lists_wrongly_is_found(edit: str) -> None:
    modules = {name: _edited(name, *LISTED_WRONGLY[edit]) for name in ("gate", "chosen")}
    with pytest.raises(AssertionError):
        for name, *sizes in (("gate", 128, 96), ("gate", 64, 64), ("chosen", 64, 64)):
            _check_lists(modules[name], name, data_case(name, 500), *sizes)


def test_the_right_kernels_survive_few_tiles_at_a_time() -> None:
    module = _edited("gate", "CHUNK=128", "CHUNK=128")
    for sizes in ((128, 96), (64, 64)):
        _check_lists(module, "gate", data_case("gate", 500), *sizes)


@pytest.mark.parametrize("name", ["gate", "stripes"])
def test_calls_with_kept_lists_have_the_same_results(name: str) -> None:
    """The second layer finds what the first has made, also in inference mode."""
    spec, module, case = _spec(name), _module(name), data_case(name, 150)
    qkv = [x.clone().requires_grad_() for x in inputs(case, spec, torch.float32)]
    params = case.arguments(spec)

    def results(tiles: Any) -> list[torch.Tensor]:
        out, lse = module.attention(*qkv, **params, return_lse=True, tiles=tiles)
        return [out, lse, *torch.autograd.grad(out, qkv, torch.ones_like(out))]

    expected, tiles = results(None), module.tiles(*qkv[:2], **params)
    with torch.inference_mode():
        out = module.attention(*qkv, **params, tiles=tiles)
    assert torch.equal(out, expected[0])
    assert len(tiles.bits.lists) == 1
    for _ in range(2):
        for found, x in zip(results(tiles), expected, strict=True):
            assert torch.equal(found, x)
        assert len(tiles.bits.lists) == 3


def test_lists_of_all_sizes_are_kept_apart() -> None:
    name = "gate"
    module, case = _module(name), data_case(name, 500)
    q, _, _ = inputs(case, _spec(name), torch.float32)
    bits, visible = _bits(module, name, case), _visible(module, name, case)
    bits.lists = module._Lists()
    for sizes in (*SIZES, *SIZES):
        check_lists(module, q, bits, visible, *sizes)
    assert len(bits.lists) == 2 * len(SIZES)
