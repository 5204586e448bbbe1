"""Conditions on each key alone are bits that the lanes of a warp make together."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest

from flashgen import AttentionSpec, Tensor
from flashgen.config import KernelConfig
from support.data_masks import data_case, data_mask
from support.gluon import interpreted
from support.slip import with_slip
from support.variants import rendered_module
from sweep.hopper import check_hopper

#: Scores of 128 and of 64 columns, and of 32, where lanes have the same columns.
CONFIGS = {
    64: KernelConfig(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2),
    128: KernelConfig(BLOCK_M=192, BLOCK_N=64, num_warps=12, num_stages=2),
    256: KernelConfig(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
}


_KEEP = Tensor("keep", ("batch", "kv_len"), "int32")


def _check(name: str, head_dim: int, length: int, slip: str = "") -> None:
    case = data_case("flags" if name == "flags" else "padding", length, batch=1 + (name != "flags"))
    if name == "shorter":
        case = replace(case, params={"keep": case.params["keep"]})
    check_hopper(_module(name, head_dim, slip), _spec(name, head_dim), case, CONFIGS[head_dim])


@functools.cache
def _spec(name: str, head_dim: int) -> AttentionSpec:
    """Of `shorter` bounds find the range: there are no lists, and consumers load elements."""
    if name == "shorter":
        return AttentionSpec(head_dim, mask=lambda b, h, q, kv: (kv <= q) & (_KEEP[b, kv] > 0))
    return AttentionSpec(head_dim, mask=data_mask(name))


@functools.cache
def _module(name: str, head_dim: int, slip: str) -> ModuleType:
    def edited(source: str) -> str:
        return interpreted(with_slip(*(SLIPS | SLIPS_OF_LOADS)[slip])(source) if slip else source)

    return rendered_module(_spec(name, head_dim), hopper=True, edit_source=edited)


@pytest.mark.parametrize("head_dim", CONFIGS)
@pytest.mark.parametrize("name", ["flags", "padding", "shorter"])
def test_conditions_on_keys(name: str, head_dim: int) -> None:
    _check(name, head_dim, 330)


#: Of kernels whose consumers load elements themselves.
SLIPS_OF_LOADS = {
    "columns_of_bits": ("first + 8 * eighth[:, None]", "first + 4 * eighth[:, None]"),
    "columns_in_eight": ("+ column[None, :]", "+ 0 * column[None, :]"),
    "first_key": (
        "kv_idx = _shared_columns(scores, start_n)",
        "kv_idx = _shared_columns(scores, 0)",
    ),
}

SLIPS = {
    "places_of_bits": ("gl.where(shown, 1 << place, 0)", "gl.where(shown, 2 << place, 0)"),
    "elements_of_another_stage": (
        "_shared_elements(col_flag_tiles.index(stage), scores)",
        "_shared_elements(col_flag_tiles.index(1 - stage), scores)",
    ),
    "distance": ("_below(kv_idx - q_idx - 1, width)", "_below(kv_idx - q_idx, width)"),
    "distance_back": ("_at_least(kv_idx - q_idx, -width)", "_at_least(kv_idx - q_idx, width)"),
}


@pytest.mark.parametrize("name", SLIPS_OF_LOADS)
def test_a_slip_of_loads_does_not_survive(name: str) -> None:
    with pytest.raises(AssertionError):
        _check("shorter", 64, 330, name)


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_does_not_survive(name: str) -> None:
    with pytest.raises(AssertionError):
        _check("flags", 64, 330, name)
