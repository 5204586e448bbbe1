"""Packed sequences of masks that only the data knows, by all kernels of both passes."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import AttentionSpec
from support.cases import Case
from support.data_masks import DATA_MASKS, data_case, data_mask
from support.gluon import interpreted
from support.packed import (
    Packing,
    hold_hopper_varlen,
    hold_hopper_varlen_backward,
    hold_outputs,
    hold_varlen,
    packed,
)
from support.turns import in_turns
from support.variants import first_on_hopper, rendered_module

LENGTHS = (5, 0, 200, 1, 130)
TILES = ((32, 16), (64, 128), (16, 64))


@functools.cache
def _spec(name: str) -> AttentionSpec:
    return AttentionSpec(16, mask=data_mask(name), forms=("dense", "varlen"))


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(_spec(name), name=name)


@functools.cache
def _of_gluon(name: str, head_dim: int) -> tuple[AttentionSpec, ModuleType]:
    spec = AttentionSpec(head_dim, mask=data_mask(name), forms=("dense", "varlen"))
    return spec, rendered_module(spec, name=name, hopper=True, edit_source=interpreted)


def _packing(name: str, lengths: tuple[int, ...] = LENGTHS, heads: int = 2) -> Packing:
    case: Case = data_case(name, max(lengths), batch=len(lengths), heads=heads)
    return Packing(lengths, case=replace(case, q_len=0, kv_len=0, batch=1))


def _config(block_m: int, block_n: int) -> dict[str, int | bool]:
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 2, "USE_TMA": False,
    }  # fmt: skip


LEARNED = ("heat",)  # its gradient is that of a mask: there is none


@pytest.mark.parametrize(
    ("name", "m", "n"), in_turns([x for x in DATA_MASKS if x not in LEARNED], TILES, every=3)
)
def test_each_sequence_is_right(name: str, m: int, n: int) -> None:
    hold_varlen(_module(name), _spec(name), _packing(name), torch.float16, _config(m, n))


def test_hidden_tiles_are_not_visited() -> None:
    """Values that no query of a tile sees can be NaN: nobody reads them."""
    name = "flags"
    packing = _packing(name, (70, 256))
    packing.case.params["flag"].zero_()
    call = packed(_spec(name), packing, torch.float16)
    q, k, v = call.qkv
    given = (*call.lengths.values(), 0.25, *call.params.values())
    clean = _module(name)._launch_varlen(q, k, v, *given, _config(64, 64))[0]
    k[70 + 192 :], v[70 + 192 :] = torch.nan, torch.nan
    poisoned = _module(name)._launch_varlen(q, k, v, *given, _config(64, 64))[0]
    assert torch.equal(clean[: 70 + 128], poisoned[: 70 + 128])


def test_a_broken_sequence_is_nan_and_changes_no_other() -> None:
    name = "islands"
    packing = _packing(name)
    call = packed(_spec(name), packing, torch.float16)
    given = {**call.lengths, "max_q_len": 150}
    out, _ = _module(name)._launch_varlen(
        *call.qkv, *given.values(), 0.25, *call.params.values(), _config(32, 16)
    )
    right, _ = _module(name)._launch_varlen(
        *call.qkv, *call.lengths.values(), 0.25, *call.params.values(), _config(32, 16)
    )
    assert out[5:205].isnan().all()
    assert torch.equal(out[:5], right[:5]) and torch.equal(out[205:], right[205:])


#: Faults of the kernels that decide and list tiles, and of one that visits them.
EDITS = {
    "rows of two sequences in one place": ("// TILE + batch + q_first", "// TILE + q_first"),
    "a tile listed twice": ("seen & (full ^ masked)", "seen & (full | masked)"),
    "a tile missed": ("tl.cdiv(listed_len, LISTED)", "listed_len // LISTED"),
    "the first sequence's list": ("listed.to(tl.int64) * tiles_width", "0"),
    "another sequence's bits": ("tl.load(slots_ptr + 2) // TILE + batch", "batch"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_fault_is_found(name: str) -> None:
    before, after = EDITS[name]

    def edited(source: str) -> str:
        head, kernel, tail = source.partition("def _classify_sequence_tiles(")
        assert before in tail
        return head + kernel + tail.replace(before, after)

    module = rendered_module(_spec("islands"), name="islands", edit_source=edited)
    packing = _packing("islands")
    call = packed(_spec("islands"), packing, torch.float16)
    given = (*call.qkv, *call.lengths.values(), 0.25, *call.params.values())
    out, lse = module._launch_varlen(*given, _config(32, 16))
    with pytest.raises(AssertionError):
        hold_outputs(_spec("islands"), packing, call, out, lse)


#: Of the Gluon kernels: head dimension and heads of q. Lists by head and of all heads, tensors of a
#: sequence and of all, elements by key and by pair, heads of a group in parts.
BY_GLUON = {"islands": (128, 4), "flags": (64, 2), "gate": (128, 4), "dense": (128, 2)}
LONG = (70, 0, 130, 1, 450)


@pytest.mark.parametrize("name", BY_GLUON)
def test_each_sequence_is_right_by_the_gluon_kernels(name: str) -> None:
    head_dim, heads = BY_GLUON[name]
    spec, module = _of_gluon(name, head_dim)
    packing = _packing(name, LONG, heads)
    hold_hopper_varlen(module, spec, packing, first_on_hopper(spec).as_dict())
    hold_hopper_varlen_backward(module, spec, packing, module.BACKWARD_HOPPER)


#: Elements of keys alone, which the producer of the Gluon forward kernel hands over: of a sequence
#: and of all, all columns at once, eight of them, and each once a warp.
HANDED = (("islands", 128), ("islands", 64), ("heat", 128), ("heat", 64), ("flags", 64))
IN_NO_ORDER = (1, 333, 0, 0, 65, 64, 7, 129)


@pytest.mark.parametrize(("name", "head_dim"), HANDED)
def test_elements_that_are_handed_over(name: str, head_dim: int) -> None:
    spec, module = _of_gluon(name, head_dim)
    packing = _packing(name, IN_NO_ORDER)
    hold_hopper_varlen(module, spec, packing, first_on_hopper(spec).as_dict())


@pytest.mark.parametrize("head_dim", [128, 64])
def test_tiles_that_are_computed_again(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key's scores are so far above all others that weights overflow."""
    spec, module = _of_gluon("islands", head_dim)
    tell, told = module._set_overflow, []

    def told_too(number: Any, *others: Any) -> None:
        told.append(int(number))
        tell(number, *others)

    monkeypatch.setattr(module, "_set_overflow", told_too)
    packing = _packing("islands", (33, 710, 130))
    call = packed(spec, packing, torch.bfloat16)
    call.qkv[1][33 + 237] = 300.0
    call.alone[1][0][1][:, :, 237] = 300.0
    given = (*call.qkv, *call.lengths.values(), head_dim**-0.5, *call.params.values())
    out, lse = module._launch_hopper_varlen(*given, first_on_hopper(spec).as_dict())
    hold_outputs(spec, packing, call, out, lse, gluon=True)
    assert any(told)


#: Faults of the Gluon kernels and their launchers: before, after, of which mask, of gradients.
EDITS_OF_GLUON = {
    "another sequence's keys": ("call.img[0] + kv_start", "call.img[0] + 0 * kv_start", "islands"),
    "another sequence's elements": (
        " " * 8 + "img = (call.img[0] + kv_start", " " * 8 + "img = (call.img[0] + 0 * kv_start",
        "islands",
    ),
    "elements of another stage": (
        "_elements(col_img_tiles.index(stage), scores)",
        "_elements(col_img_tiles.index(1 - stage), scores)", "islands",
    ),
    "elements of another stage, as bits": (
        "_shared_elements(col_flag_tiles.index(stage), scores)",
        "_shared_elements(col_flag_tiles.index(stage ^ 1), scores)", "flags",
    ),
    "elements behind a sequence": (
        "img = (call.img[0] + kv_start.to(gl.int64) * call.img[4], batch + 1, kv_len,",
        "img = (call.img[0] + kv_start.to(gl.int64) * call.img[4], batch + 1, 64,", "islands",
    ),
    "keys before their elements": (
        "mbarrier.init(kv_full.index(i), count=2)", "mbarrier.init(kv_full.index(i), count=1)",
        "islands",
    ),
    "the visit before": ("tiles_ptr + 2 + visit", "tiles_ptr + 1 + visit", "islands"),
    "the first tile's list": ("listed = tile_m", "listed = tile_m * 0", "islands"),
    "the first head's list": ("tile_m * num_q_heads + head", "tile_m * num_q_heads", "gate"),
    "too many without a mask": ("* BLOCK_N, entry % 2 != 0", "* BLOCK_N, entry < 2", "islands"),
    "the list of counts": ("slots[1:]", "slots[:-1]", "islands"),
}  # fmt: skip
EDITS_OF_GLUON_GRADIENTS = {
    "the first tile's list of queries": (
        "listed = work_tile.slot", "listed = work_tile.slot * 0", "islands"
    ),
    "the same tile again": (
        "next_tile, next_member = _query_tile_of_member(\n                    visit + 1,",
        "next_tile, next_member = _query_tile_of_member(\n                    visit,", "islands"
    ),
    "another tile is loaded": ("_query_tile(place, runs) >> 1", "_query_tile(0, runs) >> 1",
                               "islands"),
    "without a mask at the wrong end": ("visits - runs.unmasked, 0)", "0, 0)", "islands"),
    "the next head's list": ("work_tile.slot * num_q_heads + head",
                             "work_tile.slot * num_q_heads", "gate"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*EDITS_OF_GLUON, *EDITS_OF_GLUON_GRADIENTS])
def test_a_fault_of_the_gluon_kernels_is_found(name: str) -> None:
    before, after, mask = (EDITS_OF_GLUON | EDITS_OF_GLUON_GRADIENTS)[name]
    head_dim, heads = BY_GLUON[mask]

    def edited(source: str) -> str:
        assert before in source
        return interpreted(source.replace(before, after))

    spec, _ = _of_gluon(mask, head_dim)
    mutant = rendered_module(spec, name=mask, hopper=True, edit_source=edited)
    packing = _packing(mask, LONG, heads)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        if name in EDITS_OF_GLUON:
            hold_hopper_varlen(mutant, spec, packing, first_on_hopper(spec).as_dict())
        else:
            hold_hopper_varlen_backward(mutant, spec, packing, mutant.BACKWARD_HOPPER)
