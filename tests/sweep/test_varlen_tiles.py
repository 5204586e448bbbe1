"""Packed sequences of masks that only the data knows, by the portable kernels of both passes."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec
from support.cases import Case
from support.data_masks import DATA_MASKS, data_case, data_mask
from support.packed import Packing, hold_outputs, hold_varlen, packed
from support.turns import in_turns
from support.variants import rendered_module

LENGTHS = (5, 0, 200, 1, 130)
TILES = ((32, 16), (64, 128), (16, 64))


@functools.cache
def _spec(name: str) -> AttentionSpec:
    return AttentionSpec(16, mask=data_mask(name), forms=("dense", "varlen"))


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(_spec(name), name=name)


def _packing(name: str, lengths: tuple[int, ...] = LENGTHS) -> Packing:
    case: Case = data_case(name, max(lengths), batch=len(lengths))
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
