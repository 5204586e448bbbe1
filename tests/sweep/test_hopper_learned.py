"""Gluon kernels over keys and over queries that split a pass: what each of them learns.

The vocabulary has the usual ones; here two kernels share a score function, or nothing is learned.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Float,
    Mask,
    Tensor,
    additive_bias,
    alibi,
    block_sparse,
    causal,
    global_tokens,
    kv_len,
    log,
    prefix_lm,
    relative_bias,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
    t5_bias,
    tanh,
)
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import Case
from support.contract import native_inputs
from support.gluon import interpreted
from support.turns import in_turns
from support.variants import rendered_module
from sweep.hopper import check_hopper_backward

NEAR = Tensor("near", ("num_q_heads", 999))
TILTS = Tensor("tilts", ("batch", "q_len"))
LIFTS = Tensor("lifts", ("batch", "kv_len"), "bfloat16")
CELLS = Tensor("cells", (7, 5))
PAIRS = Tensor("pairs", ("batch", "num_q_heads", "q_len", "kv_len"), "bfloat16")
SHARED = Tensor("shared", ("num_q_heads", "q_len", "kv_len"), "float16")
SLOPES = Tensor("slopes", ("num_q_heads",))
SINKS = Tensor("sinks", ("num_q_heads",))
ANSWERS = Tensor("answers", ("batch", "q_len"), "bool")
FACTOR = Float("factor", 0.5)
ENDS = Tensor("ends", ("batch", "q_len"), "int32")

BOTTOM = causal(align="bottom_right")
EACH_ROW = Mask(lambda b, h, q, kv: kv < ENDS[b, q], "each row has its end")
CHOSEN = Mask(lambda b, h, q, kv: ANSWERS[b, q], "some rows see nothing")

SPECS = {
    # Heads, rows and distances over queries, keys over keys.
    "of_all_kinds": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: (
            s * SLOPES[h] + TILTS[b, q] + LIFTS[b, kv] + NEAR[h, kv - q + 499]
        ),
    ),
    "keys_with_slopes": AttentionSpec(
        128,
        mask=BOTTOM,
        score=softcap(8.0).then(lambda s, b, h, q, kv: s + LIFTS[b, kv] * (1 + h) + TILTS[b, q]),
    ),
    # Of 64 columns a slope for each element asks for shorter tiles of queries.
    "narrow_slopes": AttentionSpec(
        64, mask=BOTTOM, score=softcap(8.0).then(lambda s, b, h, q, kv: s * SLOPES[h] + TILTS[b, q])
    ),
    # Sums that several programs add to.
    "shared_elements": AttentionSpec(
        72, "float16", score=lambda s, b, h, q, kv: s + CELLS[q % 7, kv % 5]
    ),
    "with_a_sink": AttentionSpec(
        128,
        mask=BOTTOM,
        score=relative_bias(40, align="bottom_right"),
        normaliser=softmax(sink=lambda b, h: SINKS[h]),
        deterministic=True,
    ),
    "sigmoid": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + TILTS[b, q],
        normaliser=sigmoid_attention(),
    ),
    "roles": AttentionSpec((192, 128), mask=BOTTOM, score=alibi(SLOPES, align="bottom_right")),
    # The consumer with the gradients of keys sums what is a key's, before it scales its gradients.
    "roles_of_keys": AttentionSpec(
        192,
        "float16",
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s * (2 - h) + LIFTS[b, kv] * (1 + h) + (1 + q) * SLOPES[h],
    ),
    "roles_of_all_kinds": AttentionSpec(
        192,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: (
            s * SINKS[h] + SLOPES[h] + TILTS[b, q] * LIFTS[b, kv] + NEAR[h, kv - q + 499]
        ),
    ),
    # A slope for each element: three tiles of keys would share a distance if they were shorter.
    "wide_slopes": AttentionSpec(
        256,
        "float16",
        mask=BOTTOM,
        score=softcap(8.0).then(relative_bias(40, align="bottom_right")),
    ),
    "wide_pairs": AttentionSpec(
        256, mask=BOTTOM, score=lambda s, b, h, q, kv: s + SLOPES[h] * PAIRS[b, h, q, kv]
    ),
    # Each pair has its own element, or one with the other batch entries.
    "pairs": AttentionSpec(
        128, "float16", score=lambda s, b, h, q, kv: s + PAIRS[b, h, q, kv], deterministic=True
    ),
    "shared_pairs": AttentionSpec(
        64, mask=BOTTOM, score=lambda s, b, h, q, kv: s * (1 + SHARED[h, q, kv] / 4)
    ),
    "drops": AttentionSpec(
        128,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + NEAR[h, kv - q + 499] + LIFTS[b, kv],
        dropout=True,
    ),
    # Both kernels go by lists of tiles.
    "listed": AttentionSpec(
        64,
        mask=block_sparse(block=16),
        score=relative_bias(40, align="bottom_right"),
        deterministic=True,
    ),
    # What keys learn depends on what queries read.
    "products_of_both": AttentionSpec(
        64, mask=BOTTOM, score=lambda s, b, h, q, kv: s + TILTS[b, q] * LIFTS[b, kv]
    ),
    "positions_beside_both": AttentionSpec(
        128,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + (1 + q) / 100 * tanh(TILTS[b, q]) * LIFTS[b, kv],
    ),
    # Bounds are extremes over rows that are in no order.
    "ends_of_rows": AttentionSpec(
        64,
        mask=BOTTOM & EACH_ROW,
        score=relative_bias(40, align="bottom_right"),
        deterministic=True,
    ),
    "chosen_rows": AttentionSpec(
        64, mask=BOTTOM & CHOSEN, score=lambda s, b, h, q, kv: s + TILTS[b, q]
    ),
    "sinks_of_more_than_tensors": AttentionSpec(
        64,
        mask=BOTTOM,
        score=lambda s, b, h, q, kv: s + TILTS[b, q],
        normaliser=softmax(sink=lambda b, h: SINKS[h] * FACTOR - log(kv_len + 1.0)),
    ),
    "nothing_is_learned": AttentionSpec(64, mask=EACH_ROW, deterministic=True),
}

#: A single pass: its warps add sums along diagonals to memory, and lanes sum rows in registers.
OF_ONE_PASS = {
    "with_a_sink": replace(SPECS["with_a_sink"], deterministic=False),
    "listed": replace(SPECS["listed"], deterministic=False),
    "ends_of_rows": replace(SPECS["ends_of_rows"], deterministic=False),
    # What a head learns depends on the products, beside a bias of its distances.
    "gains": AttentionSpec(
        64, mask=BOTTOM, score=lambda s, b, h, q, kv: s * SLOPES[h] + NEAR[h, kv - q + 499]
    ),
    "slopes_of_elements": AttentionSpec(
        64, "float16", score=softcap(8.0).then(relative_bias(40, align="bottom_right"))
    ),
    # Tiles of 64 queries, and of 128.
    "segments": AttentionSpec(96, score=lambda s, b, h, q, kv: s + NEAR[h, kv - q + 499]),
    "buckets": AttentionSpec(64, mask=BOTTOM, score=t5_bias(align="bottom_right")),
    # Two terms of a distance, of which one depends on the products.
    "two_terms": AttentionSpec(
        64, score=lambda s, b, h, q, kv: s * (1 + NEAR[h, kv - q + 499]) + log(1.0 + abs(q - kv))
    ),
    # Gradients of pairs are stored, zeros of those that no visit computes as well: of a run of
    # tiles by the producer, of lists and of several runs by the launcher.
    "pairs": replace(SPECS["pairs"], deterministic=False),
    "pairs_to_the_end": AttentionSpec(64, mask=BOTTOM, score=additive_bias(PAIRS)),
    "pairs_in_a_window": AttentionSpec(
        64,
        mask=sliding_window(40, 30, align="bottom_right"),
        score=softcap(8.0).then(additive_bias()).then(additive_bias(PAIRS)),
    ),
    "pairs_in_segments": AttentionSpec(
        96, mask=prefix_lm(50, align="bottom_right"), score=additive_bias(PAIRS)
    ),
    "pairs_listed": AttentionSpec(64, mask=block_sparse(block=16), score=additive_bias(PAIRS)),
    "pairs_in_runs": AttentionSpec(
        64,
        mask=sliding_window(20, 0, align="top_left") | global_tokens(9, align="top_left"),
        score=lambda s, b, h, q, kv: s * SLOPES[h] + PAIRS[b, h, q, kv] * LIFTS[b, kv],
    ),
}

CASES = (Case(256, 256, 2, 4, 2), Case(130, 300, 1, 3, 1), Case(200, 70, 2, 2, 2))


@functools.cache
def _module(name: str) -> ModuleType:
    return rendered_module(SPECS[name], hopper=True, edit_source=interpreted)


def _names(name: str) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(SPECS[name], name)))


@pytest.mark.parametrize(("name", "case"), in_turns(SPECS, CASES, every=6), ids=str)
def test_backward(name: str, case: Case) -> None:
    names = _names(name)
    assert names.split and not names.why_not and not names.queries_portable
    drops = {"dropout_p": 0.3} if SPECS[name].dropout else {}
    check_hopper_backward(_module(name), SPECS[name], replace(case, params=drops))


@pytest.mark.parametrize(("name", "case"), in_turns(OF_ONE_PASS, CASES, every=3), ids=str)
def test_a_single_pass(name: str, case: Case) -> None:
    spec = OF_ONE_PASS[name]
    names = HopperBackwardSplit(backward_plan(lower(spec, name)))
    assert not names.split and not names.why_not
    found = {x.variable for x in names.text.input_gradients}
    assert found == {x.variable for x in names.backward.input_gradients}
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    check_hopper_backward(module, spec, case)


def test_which_have_shorter_tiles() -> None:
    """Of queries, over keys; of keys, over queries."""
    tiles = {name: _names(name) for name in SPECS}
    assert {name for name, of in tiles.items() if (of.width, of.block_m) == (64, 64)} == {
        "narrow_slopes",
        "shared_pairs",
    }
    blocks = {name: of.of_queries.block_n for name, of in tiles.items()}
    assert {name for name, keys in blocks.items() if keys == 32} == {"wide_pairs"}
    assert blocks["wide_slopes"] == 64 and blocks["with_a_sink"] == 128


def test_of_all_kinds_has_each_in_its_place() -> None:
    for name in ("of_all_kinds", "roles_of_all_kinds"):
        names = _names(name)
        assert [item.over for item in names.text.input_gradients] == ["columns"]
        found = {item.over for item in names.of_queries.text.input_gradients}
        assert found == {"heads", "rows", "diagonals"}
    assert {x.over for x in _names("roles_of_keys").text.input_gradients} == {"columns"}
    assert [x.once for x in _names("pairs").of_queries.learned.stored] == [True]
    assert [x.once for x in _names("wide_pairs").of_queries.learned.elements] == [True]
    assert [x.once for x in _names("shared_pairs").of_queries.learned.elements] == [False]


def test_sums_along_diagonals_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for those of one tile of queries, each has a launch."""
    module = _module("with_a_sink")
    monkeypatch.setattr(module, "SUMS_AT_ONCE", 1)
    check_hopper_backward(module, SPECS["with_a_sink"], Case(300, 300, 2, 4, 2))


@pytest.mark.parametrize("name", ["pairs_in_a_window", "pairs_in_runs", "with_a_sink", "buckets"])
def test_frozen_tensors_have_no_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``requires_grad`` nothing is learned; gradients of q, k and v stay as they are."""
    spec, case = OF_ONE_PASS[name], Case(130, 200, 1, 2, 1)
    module = rendered_module(spec, hopper=True, edit_source=interpreted)
    run, learned = module._backward_kernels_hopper, []

    def kept(*given: Any) -> Any:
        grads = run(*given)
        learned.append([x is not None for x in grads[3:]])
        return grads

    monkeypatch.setattr(module, "_backward_kernels_hopper", kept)
    found = []
    for frozen in (False, True):
        params = case.arguments(spec)
        leaves = [x.requires_grad_() for x in native_inputs(case, spec)]
        if not frozen:
            params = {
                n: x.requires_grad_() if x.is_floating_point() else x for n, x in params.items()
            }
        out = module.attention(*leaves, **params)
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    assert all(learned[0]) and not any(learned[1])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right)
