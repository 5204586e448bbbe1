"""Packed sequences by the Gluon forward kernel, on the CPU, against float64."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    alibi,
    causal,
    full,
    kv_len,
    prefix_lm,
    q_len,
    sigmoid_attention,
    sliding_window,
    softcap,
)
from support.cases import Case
from support.gluon import interpreted
from support.packed import (
    Packing,
    hold_hopper_varlen,
    hold_hopper_varlen_backward,
    int32,
    packed,
)
from support.variants import first_on_hopper, rendered_module

FORMS = ("dense", "varlen")
SLOPES = Tensor("slopes", ("num_q_heads",))

#: Every structure that head dimensions ask for; runs of keys from the first on, of a window and
#: several; scores that read positions, and lengths.
SPECS = {
    "causal_d64": AttentionSpec(64, "float16", mask=causal(), forms=FORMS),
    "causal_d128": AttentionSpec(128, mask=causal(), forms=FORMS),
    "full_d128": AttentionSpec(128, mask=full(), forms=FORMS),
    "end_d256": AttentionSpec(256, mask=causal(), align="bottom_right", forms=FORMS),
    "window_d112": AttentionSpec(
        112, mask=sliding_window(Int("left", 70), 3), align="bottom_right", forms=FORMS
    ),
    "two_runs_d128": AttentionSpec(
        128, mask=sliding_window(60, 0) | prefix_lm(20), align="bottom_right", forms=FORMS
    ),
    "alibi_d128": AttentionSpec(
        128, mask=causal(), align="bottom_right", score=alibi(SLOPES), forms=FORMS
    ),
    "softcap_d128": AttentionSpec(128, mask=causal(), score=softcap(20.0), forms=FORMS),
    "sigmoid_d64": AttentionSpec(
        64,
        mask=causal(),
        align="bottom_right",
        score=lambda s, b, h, q, kv: s * q_len / (q_len + kv_len),
        normaliser=sigmoid_attention(),
        forms=FORMS,
    ),
    "unequal_dims": AttentionSpec((192, 128), mask=causal(), align="bottom_right", forms=FORMS),
}
HEADS = Case(0, 0, q_heads=2, kv_heads=1)
ALIKE = Packing((70, 0, 130, 1, 250), case=HEADS)
ROOMY = Packing((70, 0, 200, 1, 10, 33), (9, 40, 130, 0, 300, 64), (0, 3, 20, 2, 70, 0), case=HEADS)


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], name=name, hopper=True, edit_source=interpreted)


@pytest.mark.parametrize("name", SPECS)
def test_each_sequence_is_right(name: str) -> None:
    spec = SPECS[name]
    for packing in [ALIKE, ROOMY][: 1 if spec.equal_lengths else 2]:
        hold_hopper_varlen(_module(name), spec, packing, first_on_hopper(spec).as_dict())


def test_no_sequence_has_keys() -> None:
    """All results are those of the kernel that fills rows: there are fewer tiles than programs."""
    packing = Packing((5, 0, 130), (0, 0, 0), (4, 0, 1), case=HEADS)
    spec = SPECS["full_d128"]
    hold_hopper_varlen(_module("full_d128"), spec, packing, first_on_hopper(spec).as_dict())


def test_a_broken_sequence_is_nan_and_changes_no_other() -> None:
    spec, module = SPECS["full_d128"], _module("full_d128")
    config = first_on_hopper(spec).as_dict()
    call = packed(spec, Packing((70, 40, 130), (60, 50, 99), case=HEADS), torch.bfloat16)
    right = {**call.lengths}
    wrong = {**right, "cu_seqlens_kv": int32((0, 60, 10**9, 209))}
    before, lse_before = module._launch_hopper_varlen(*call.qkv, *right.values(), 0.1, config)
    out, lse = module._launch_hopper_varlen(*call.qkv, *wrong.values(), 0.1, config)
    assert torch.equal(out[:70], before[:70]) and torch.equal(lse[:70], lse_before[:70])
    assert out[70:240].isnan().all() and lse[70:240].isnan().all()
    assert not out[240:].any()


#: Faults of the kernel, by what is replaced: a variant that shows each.
MUTANTS = [
    ("_async_store(out_desc, [0, head, q_start + q_first, COLUMN], tile)",
     "_async_store(out_desc, [0, head, q_first, COLUMN], tile)", "causal_d128"),
    ("row = (q_start + q_first).to(gl.int64)", "row = q_first.to(gl.int64)", "causal_d128"),
    ("mask = q_first + offs_m <= q_last", "mask = q_first + offs_m >= 0", "causal_d128"),
    ("rows = (_q_start(place) + offs_m)", "rows = offs_m", "causal_d128"),
    ("start = (work.kv_start, kv_head,", "start = (work.q_start, kv_head,", "end_d256"),
    ("shown &= key_rows < kv_len", "pass", "full_d128"),
    ("kv_len = _kv_len(place)", "kv_len = _q_len(place)", "full_d128"),
    ("tiles = tl.where(((queries == 0) | (keys == 0)) == of_keyless, tiles, 0)", "pass",
     "full_d128"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "name"), MUTANTS)
def test_a_fault_is_found(before: str, after: str, name: str) -> None:
    def edit(source: str) -> str:
        assert before in source
        return interpreted(source.replace(before, after))

    spec = SPECS[name]
    mutant = rendered_module(spec, name=name, hopper=True, edit_source=edit)
    packing = ALIKE if spec.equal_lengths else ROOMY
    with pytest.raises((AssertionError, RuntimeError)):
        hold_hopper_varlen(mutant, spec, packing, first_on_hopper(spec).as_dict())


BACKWARD = ("causal_d64", "causal_d128", "full_d128", "window_d112", "softcap_d128", "sigmoid_d64")


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_each_sequence_are_right(name: str) -> None:
    spec, module = SPECS[name], _module(name)
    for packing in [ALIKE, ROOMY][: 1 if spec.equal_lengths else 2]:
        hold_hopper_varlen_backward(module, spec, packing, module.BACKWARD_HOPPER)


def test_gradients_of_a_broken_sequence_are_nan() -> None:
    """And those of others the same as without it, but for the order of sums."""
    spec, module = SPECS["full_d128"], _module("full_d128")
    call = packed(spec, Packing((70, 40, 130), (60, 50, 99), case=HEADS), torch.bfloat16)
    config, of_both = first_on_hopper(spec).as_dict(), module.BACKWARD_HOPPER
    grads = []
    for offsets_of_keys in (call.lengths["cu_seqlens_kv"], int32((0, 60, 10**9, 209))):
        lengths = {**call.lengths, "cu_seqlens_kv": offsets_of_keys}.values()
        out, lse = module._launch_hopper_varlen(*call.qkv, *lengths, 0.1, config)
        grad_out = torch.ones_like(out)
        grads.append(
            module._varlen_backward_kernels_hopper(
                *call.qkv, *lengths, 0.1, out, lse, grad_out, None, of_both
            )
        )
    for right, wrong, length in zip(*grads, (70, 60, 60), strict=True):
        torch.testing.assert_close(wrong[:length], right[:length])
    assert grads[1][0][70:240].isnan().all() and not grads[1][0][240:].any()
    assert all(x[60:].isnan().all() for x in grads[1][1:])


#: Faults of the backward kernel.
MUTANTS_OF_GRADIENTS = [
    ("[0, row, rows_start + q_first]", "[0, row, q_first]", "causal_d128"),
    ("place = [0, head, q_start + q_first, 0]", "place = [0, head, q_first, 0]", "causal_d128"),
    ("[0, kv_head, work_tile.kv_start + kv_first, 0]", "[0, kv_head, kv_first, 0]", "causal_d128"),
    ("rows_of_head + work_tile.rows_start * 4", "rows_of_head", "causal_d128"),
    ("shown &= query_rows < q_len", "pass", "full_d128"),
    ("full_end = min(full_end, q_len // BLOCK_M)", "full_end = q_end", "full_d128"),
    ("row = (work_tile.kv_start + own_first)", "row = own_first", "full_d128"),
    ("held = offs_n < rows", "held = offs_n >= 0", "full_d128"),
]


@pytest.mark.parametrize(("before", "after", "name"), MUTANTS_OF_GRADIENTS)
def test_a_fault_of_gradients_is_found(before: str, after: str, name: str) -> None:
    def edit(source: str) -> str:
        assert before in source
        return interpreted(source.replace(before, after))

    spec = SPECS[name]
    mutant = rendered_module(spec, name=name, hopper=True, edit_source=edit)
    packing = ALIKE if spec.equal_lengths else ROOMY
    with pytest.raises((AssertionError, RuntimeError)):
        hold_hopper_varlen_backward(mutant, spec, packing, mutant.BACKWARD_HOPPER)
