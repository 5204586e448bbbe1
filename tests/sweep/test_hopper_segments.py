"""Gluon backward kernels whose columns are in two segments, on the CPU against float64."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest

from flashgen import AttentionSpec, Mask, Tensor, alibi, causal, full, sliding_window, softcap
from support.cases import Case
from support.gluon import interpreted, start_over
from support.mutants import Mutant
from support.mutants.mutant import source_of
from support.turns import in_turns
from support.variants import imported, rendered_module, shipped_specs
from sweep.hopper import check_hopper_backward

END = causal(align="bottom_right")
SLOPES = Tensor("slopes", ("num_q_heads",))
_LENGTHS = Tensor("lengths", ("batch",), "int32")
HIDDEN = causal() & Mask(lambda b, h, q, kv: (q < _LENGTHS[b]) & (kv < _LENGTHS[b]), "lengths")

#: One pass, whose consumers divide dq by segments or by halves of 128 columns; sums of learned
#: tensors and weights that are dropped; two kernels, with roles and without.
SPECS = {
    "causal_d80": shipped_specs()["causal_d80"],
    "full_d72": AttentionSpec(72, "float16", mask=full()),
    "window_d96_v64": AttentionSpec((96, 64), mask=sliding_window(100, 0, align="bottom_right")),
    "full_d128_v96": AttentionSpec((128, 96), mask=full()),
    "causal_d56_v96": AttentionSpec((56, 96), "float16", mask=END),
    "softcap_d96": AttentionSpec(96, mask=END, score=softcap(20.0)),
    "alibi_d80_v96": AttentionSpec((80, 96), mask=END, score=alibi(SLOPES, align="bottom_right")),
    "hidden_d80": AttentionSpec(80, mask=HIDDEN),
    "hidden_d96": AttentionSpec(96, mask=HIDDEN),
    "dropout_d72": AttentionSpec(72, mask=causal(), dropout=True),
    "causal_d192_v128": shipped_specs()["causal_d192_v128"],
    "full_d160": AttentionSpec(160, "float16", mask=full()),
    "softcap_d192": AttentionSpec(192, mask=END, score=softcap(20.0)),
    "hidden_d144_v96": AttentionSpec((144, 96), mask=HIDDEN),
    "deterministic_d80": AttentionSpec(80, mask=causal(), deterministic=True),
    "deterministic_hidden_d96_v64": AttentionSpec((96, 64), mask=HIDDEN, deterministic=True),
}

CASES = (Case(200, 200, 1, 2, 2), Case(130, 130, 2, 4, 2, "transposed"))
#: Of the last heads, where their tiles may be divided among programs.
DIVIDED = ("causal_d80", "causal_d56_v96", "softcap_d96", "dropout_d72")


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True, edit_source=interpreted)


@pytest.mark.parametrize(("name", "case"), in_turns(SPECS, CASES, every=2), ids=str)
def test_gradients(name: str, case: Case) -> None:
    check_hopper_backward(_module(name), SPECS[name], case)


@pytest.mark.parametrize("name", DIVIDED)
def test_gradients_of_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads whose tiles are whole beside those of the others."""
    module = _module(name)
    assert hasattr(module, "_divided"), "this variant's tiles are never divided"
    monkeypatch.setattr(module, "_divided", lambda *_: (1, 3))
    check_hopper_backward(module, SPECS[name], Case(200, 200, 2, 6, 2))


def test_more_keys_than_queries() -> None:
    """Tiles that end where neither the rows nor the columns of a tile do."""
    for name in ("full_d72", "window_d96_v64", "causal_d192_v128"):
        check_hopper_backward(_module(name), SPECS[name], Case(77, 333, 1, 2, 1))


def _slips() -> list[Mutant]:
    """Kernels that take a segment for another, or read a product before it ends."""

    def slip(spec: str, function: str, right: str, wrong: str, number: int = 0) -> Mutant:
        name = f"{spec}, {function}: {wrong} for {right} ({number})"
        return Mutant(name, "backward_hopper", spec, function, right, wrong, number)

    one, two = "causal_d80", "causal_d192_v128"
    return [
        slip(one, "_load_columns", "column += tiles[i].shape[4]", "pass"),
        slip(one, "_start_scores_of_keys", "use_acc=i > 0", "use_acc=False"),
        slip(one, "_start_grad_q", "k[NUMBER]", "k[1 - NUMBER]"),
        slip(one, "_backward_step", "64 * NUMBER, grad_q", "0, grad_q"),
        slip(one, "_backward_step", "_waited(3, grad_v)", "_waited(4, grad_v)"),
        slip(one, "_backward_step", "_waited(3, grad_k)", "_waited(4, grad_k)"),
        slip(one, "_backward_step", "wait(2, deps=(dp,))", "wait(3, deps=(dp,))"),
        slip(one, "_backward_step", "wait(2, deps=(grad_q,))", "wait(3, deps=(grad_q,))"),
        slip(one, "_store_gradient", "column += grads[i].shape[1]", "pass"),
        slip(one, "_store_part", "column += grads[i].shape[1]", "pass"),
        slip(one, "_store_segment", "tma.store_wait(0)", "pass"),
        slip(one, "_store_sums", "fence_async_shared()", "pass"),
        slip(one, "_place", "sums_ptr += 64 * COLUMN", "pass"),
        slip(one, "_place_sums", "5120", "4096"),
        slip(one, "_backward_kernels_hopper", "num_sums * 5", "num_sums * 4"),
        slip(two, "_values_step", "_waited(2, grad_v)", "_waited(3, grad_v)"),
        slip(two, "_keys_step", "_waited(1, grad_k)", "_waited(2, grad_k)"),
        slip(two, "_queries_step", "_waited(2, grad_q)", "_waited(3, grad_q)"),
        slip(two, "_start_scores_of_queries", "use_acc=i > 0", "use_acc=False"),
        slip(two, "_store_columns_of", "column += grads[i].shape[1]", "pass"),
    ]  # fmt: skip


@pytest.mark.parametrize("mutant", _slips(), ids=lambda mutant: mutant.name)
def test_slips_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(mutant.spec, interpreted(mutant.edited(source_of(mutant.spec, hopper=True))))
    if hasattr(module, "_divided"):
        monkeypatch.setattr(module, "_divided", lambda *_: (1, 3))

    def is_found(course: int) -> bool:
        start_over(course)
        try:
            check_hopper_backward(module, SPECS[mutant.spec], Case(200, 200, 2, 4, 1))
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(4)))
