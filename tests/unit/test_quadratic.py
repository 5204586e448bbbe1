"""Linear attention over all pairs: which specs have it, what is refused, what is said of it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashgen import (
    AttentionSpec,
    Blocks,
    Constant,
    Tensor,
    causal,
    document,
    elu_plus_one,
    favor,
    full,
    identity,
    linear,
    relu,
    sliding_window,
    softcap,
)
from flashgen.codegen.operator import operator_digest
from flashgen.explain.call import Asked
from flashgen.explain.terminal import print_account
from flashgen.explain.variant import explain_variant
from flashgen.forms.registry import why_no_form
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.quadratic import algorithm_of
from flashgen.validate import validate

GOOD = AttentionSpec(64, mask=sliding_window(8, 0), normaliser=linear(relu()))
INSISTS = linear(relu(), algorithm="quadratic")
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
MATRIX = Tensor("matrix_", (64, 32))
OF_FEATURES = Tensor("decay", ("batch", "num_kv_heads", "kv_len", 64))


def own_ids(ids: Any) -> Any:
    """A mask that is causal within runs of ids, of any tensor."""

    def own(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    return own


def findings(**fields: Any) -> list[str]:
    variant = Variant("tiny", replace(GOOD, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


@pytest.mark.parametrize(
    ("fields", "algorithm"),
    [
        ({}, "quadratic in length: sums over the keys that the mask shows do not factor"),
        ({"mask": document()}, "quadratic in length: sums over the keys"),
        ({"mask": own_ids(Tensor("ids", ("batch", None), "int32"))}, "quadratic in length: sums"),
        ({"mask": own_ids(Constant("ids", [[0, 0, 1]]))}, "quadratic in length: sums"),
        ({"mask": causal(), "align": "top_left"}, "quadratic in length: a state has keys in the"),
        ({"mask": causal(), "normaliser": INSISTS},
         "quadratic in length, as the spec insists: a state could hold the sums over earlier keys"),
        ({"mask": full(), "normaliser": INSISTS},
         "quadratic in length, as the spec insists: a state could hold the sums over all keys"),
        ({"mask": full(), "align": "top_left"}, "linear in length"),
        ({"mask": causal()}, "linear in length"),
        ({"head_dim": (256, 512)}, "quadratic"),
        ({"blocks": Blocks(BLOCK_N=64, num_warps=4)}, "quadratic"),
        ({"normaliser": linear(favor(512))}, "quadratic"),
        ({"normaliser": linear(relu(), decay=DECAY), "align": "bottom_right"}, "quadratic"),
        ({"mask": causal(), "normaliser": linear(relu(), decay=[-0.1], algorithm="quadratic")},
         "quadratic in length, as the spec insists"),
    ],
)  # fmt: skip
def test_the_mask_and_the_spec_choose_the_algorithm(fields: dict[str, Any], algorithm: str) -> None:
    assert findings(**fields) == []
    assert algorithm_of(lower(replace(GOOD, **fields), "tiny")).startswith(algorithm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"normaliser": linear(relu(), algorithm="linear")}, "mask=sliding_window(8, 0): sums over "
         "the keys that the mask shows do not factor; write full(), causal(), causal() & "
         "document() or causal() & chunked(n), or leave algorithm='linear' out"),
        ({"mask": causal(), "align": "bottom_right", "normaliser": linear(
            relu(), algorithm="linear")}, "align='bottom_right': a state has keys in the order of "
         "as many queries, and align allows other lengths; leave it out, or leave "
         "algorithm='linear' out"),
        ({"score": softcap(30.0)}, "score=softcap(30.0): linear attention has weights without a "
         "score function; put it into the feature map, or leave it out"),
        ({"dropout": True}, "dropout=True: linear attention drops no weights, by no algorithm; "
         "leave it out"),
        ({"dtype": "float16"}, "dtype='float16': sums of products of features leave the range of "
         "float16; write 'bfloat16' or 'float32'"),
        ({"forms": ("dense", "varlen")}, "forms=('dense', 'varlen'): linear attention over all "
         "pairs has the dense form alone, as it has no states; write forms=('dense',)"),
        ({"normaliser": linear(relu(), decay=OF_FEATURES)}, "mask=sliding_window(8, 0): sums over "
         "the keys that the mask shows do not factor, and with a decay for each feature, weights "
         "are no products of features alone; write causal(), or leave decay out"),
        ({"mask": causal(), "normaliser": linear(relu(), decay=OF_FEATURES, algorithm="quadratic")},
         "normaliser=linear(relu(), decay=decay, algorithm='quadratic'): with a decay for each "
         "feature, weights are no products of features alone; leave algorithm out, or write "
         "'linear'"),
        ({"mask": sliding_window(8, 3), "normaliser": linear(relu(), decay=DECAY)},
         "mask=sliding_window(8, 3): a decay is for keys in the order of queries, and this mask "
         "shows later ones; add & causal() to it, or leave decay out"),
        ({"normaliser": linear(lambda x: relu()(x @ MATRIX))}, "normaliser=linear(feature_map): "
         "kernels over all pairs multiply q and k by no matrix first; multiply them before the "
         "call"),
        ({"normaliser": linear(favor(640))}, "normaliser=linear(favor(features=640)): 640 features "
         "of a vector: products of pairs have 512; change their number, or head_dim"),
        ({"normaliser": linear(favor(64), normalise=False)}, "normaliser=linear(favor(features=64)"
         ", normalise=False): random features are divided by their largest, which cancels in "
         "normalised weights only; leave normalise=False out"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    assert findings(**fields) == [f"specs/tiny.py: tiny: {message}"]


def test_explain_counts_pairs_and_no_exponentials(tmp_path: Path) -> None:
    """Nor a softmax's steps: a window of 8 keys before each query, and features beforehand."""
    spec = replace(GOOD, head_dim=(32, 64), normaliser=linear(lambda x: [x, -x]))
    account = explain_variant(
        Variant("tiny", spec, "specs/tiny.py"), "sm_80", Asked(q_len=256), tmp_path
    )
    (own,) = account.works
    assert own.exponentials == 0 and "softmax" not in own.said.replace("without a softmax", "")
    visited = account.mask.tiles["masked"] + account.mask.tiles["unmasked"]
    block_m, block_n = map(int, own.tile.split(" x "))
    heads = account.call.batch * account.call.num_q_heads
    assert own.flops == 2 * (64 + 64) * visited * block_m * block_n * heads
    assert account.head_dims == (32, 64)
    assert account.weights.startswith("linear(feature_map), with 64 features of each vector; quad")
    assert "192 bytes for each vector" in account.remarks[0]
    assert [step.name for step in account.training] == ["FlashAttention-1"]
    printed = StringIO()
    print_account(Console(file=printed, width=200), account)
    assert f"weights: {account.weights}" in printed.getvalue()


def test_no_other_form_has_it() -> None:
    plan = lower(GOOD, "tiny")
    for form in ("varlen", "cache", "mesh"):
        assert why_no_form(form, plan).startswith(f"{form!r} has no linear attention")


def test_gluon_kernels_of_both_passes_and_of_one(tmp_path: Path) -> None:
    account = explain_variant(
        Variant("tiny", GOOD, "specs/tiny.py"), "sm_90", Asked(q_len=256), tmp_path
    )
    assert [kernel.form for kernel in account.kernels] == ["hopper", "portable"]
    decayed = replace(GOOD, normaliser=linear(relu(), decay=DECAY))
    wide, reason = replace(GOOD, head_dim=256), "its weights are products of features, and two"
    for spec, why in ((GOOD, ""), (decayed, ""), (wide, reason)):
        why_not = HopperBackward(backward_plan(lower(spec, "tiny"))).why_not
        assert why_not.startswith(why) and bool(why_not) == bool(why)


def test_identity_and_elu_differ_in_their_operators() -> None:
    specs = [replace(GOOD, normaliser=linear(x)) for x in (identity(), elu_plus_one())]
    first, second = (lower(spec, "tiny").spec.normaliser.canonical for spec in specs)
    assert first != second


def test_decays_are_part_of_what_is_computed() -> None:
    """Of the operator's name, too, which the score function of decays enters."""
    specs = [replace(GOOD, normaliser=linear(relu(), decay=x)) for x in (None, (-0.1,), (-0.2,))]
    plans = [lower(spec, "tiny") for spec in specs]
    assert len({operator_digest(plan, backward_plan(plan)) for plan in plans}) == 3
