"""Linear attention over all pairs by Gluon kernels, and defects that the calls find."""

from __future__ import annotations

import pytest

from flashgen import (
    AttentionSpec,
    causal,
    document,
    elu_plus_one,
    identity,
    linear,
    relu,
    sliding_window,
)
from support.gluon import interpreted
from support.over_pairs import DECAY, PairCall, check_pairs, dense, pasted
from support.runs import noted
from support.slip import with_slip
from support.small_sums import NONE, SUBNORMAL, results_with, unequal
from support.variants import rendered_module

#: Specs with both passes in Gluon, and a call of each.
BOTH = {
    "window": (
        AttentionSpec((96, 64), mask=sliding_window(20, 0), normaliser=linear(elu_plus_one())),
        PairCall(200, 200, batch=1),
    ),
    "aligned": (
        AttentionSpec(
            64,
            mask=causal(),
            align="bottom_right",
            normaliser=linear(identity(), normalise=False),
        ),
        PairCall(70, 140, batch=1, q_heads=2),
    ),
    "pasted": (
        AttentionSpec(128, mask=pasted, normaliser=linear(relu())),
        PairCall(80, 80, batch=1, q_heads=2, kv_heads=1),
    ),
    "quarter": (
        AttentionSpec(64, mask=dense, normaliser=linear(relu())),
        PairCall(128, 192, batch=1, q_heads=1, kv_heads=1),
    ),
    "hidden": (
        AttentionSpec(64, mask=document(), normaliser=linear(elu_plus_one())),
        PairCall(140, 140, q_heads=2, hidden=True),
    ),
    "decays of heads": (
        AttentionSpec(
            64,
            mask=causal() & document(),
            normaliser=linear(elu_plus_one(), decay=(-0.1, -0.5), algorithm="quadratic"),
        ),
        PairCall(140, 140, batch=1),
    ),
    "decays of keys": (
        AttentionSpec(128, mask=sliding_window(30, 0), normaliser=linear(relu(), decay=DECAY)),
        PairCall(140, 140, q_heads=2, steep=True),
    ),
    "decays of keys in parts": (
        AttentionSpec(
            (96, 64),
            mask=causal(),
            normaliser=linear(identity(), decay=DECAY, normalise=False, algorithm="quadratic"),
        ),
        PairCall(140, 140, batch=1, steep=True),
    ),
}

#: One whose gradients two portable kernels compute.
WIDE = AttentionSpec((144, 64), mask=sliding_window(30, 0), normaliser=linear(relu(), decay=DECAY))

#: Defects: the text, what stands in its place, and the call that finds it.
DEFECTS = {
    "hidden keys": ('gl.where(scores == float("-inf"), 0.0, scores)  # a', "scores  # a", "window"),
    "hidden parts of tiles": ("gl.where(shown != 0, scores, 0.0)",
                              'gl.where(shown != 0, scores, float("-inf"))', "quarter"),
    "0 / 0": ("gl.where(gl.abs(total) < 1.1754943508222875e-38, 0.0, 1.0 / total)", "1.0 / total",
              "pasted"),
    "no scale": ("gl.full([64], scale, gl.float32, ROWS)", "gl.full([64], 1.0, gl.float32, ROWS)",
                 "aligned"),
    "gradients of hidden keys": ('p = gl.where(scores == float("-inf"), 0.0, p)', "p = p",
                                 "window"),
    "infinite weights": ("scores = gl.maximum(scores, -3.0e38)", "scores = scores", "window"),
    "gradients that are not divided": ("grad_out * inverse[:, None]", "grad_out", "window"),
    "no scale of gradients by v": ("grad_v = grad_v * scale", "grad_v = grad_v", "aligned"),
    "decays up to a query": ("products, mask=offs < q_len", "-products, mask=offs < q_len",
                             "decays of keys in parts"),
    "decays up to a key": ("own_total, -scale * learned", "own_total, scale * learned",
                           "decays of keys"),
    "other keys": ("own_keys = work_tile.kv_first + 64 * NUMBER",
                   "own_keys = work_tile.kv_first + 0 * NUMBER", "decays of keys"),
    "keys of parts": ("total + offs, -products", "total + offs, products",
                      "decays of keys in parts"),
    "one segment": ("products += _place(", "products = _place(", "decays of keys in parts"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH)
def test_both_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, call = BOTH[name]
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    assert hasattr(module, "_backward_kernels_hopper")
    if name.endswith("parts"):  # of the second head of keys
        monkeypatch.setattr(module, "_divided", lambda *_: (1, 2))
    before = noted(module).runs
    check_pairs(module, spec, call)
    assert module.runs > before


def test_gradients_by_the_portable_kernels() -> None:
    module = rendered_module(WIDE, hopper=True, edit_source=interpreted)
    assert hasattr(module, "_launch_hopper")
    assert not hasattr(module, "_backward_kernels_hopper")
    check_pairs(module, WIDE, PairCall(100, 100, batch=1, q_heads=2, steep=True))


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, call = DEFECTS[name]
    spec, found_by = BOTH[call]

    def edited(source: str) -> str:
        return interpreted(with_slip(old, new)(source))

    module = rendered_module(spec, hopper=True, edit_source=edited)
    if call.endswith("parts"):
        monkeypatch.setattr(module, "_divided", lambda *_: (1, 2))
    with pytest.raises(AssertionError, match="error"):
        check_pairs(module, spec, found_by)


@pytest.mark.parametrize("least", ["1.1754943508222875e-38", "1e-45"])
def test_a_subnormal_sum_counts_as_none(least: str) -> None:
    spec, _ = BOTH["window"]

    def edited(source: str) -> str:
        slip = with_slip("gl.abs(total) < 1.1754943508222875e-38", f"gl.abs(total) < {least}")
        return interpreted(slip(source))

    module = rendered_module(spec, hopper=True, edit_source=edited)
    found = (results_with(module, spec, x) for x in (SUBNORMAL, NONE))
    assert bool(unequal(*found)) == (least == "1e-45")
