"""Linear attention in a spec: feature maps, what is refused and why."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Blocks,
    Float,
    Int,
    Tensor,
    causal,
    chunked,
    document,
    elu_plus_one,
    exp2,
    favor,
    full,
    identity,
    linear,
    relu,
    sliding_window,
    softcap,
    where,
)
from flashgen.errors import FlashgenError, MaskError
from flashgen.explain.call import Asked
from flashgen.explain.variant import explain
from flashgen.feature_maps import as_feature_map
from flashgen.loader import Variant
from flashgen.masks import as_mask
from flashgen.plan import lower
from flashgen.plan.linear import LinearPlan
from flashgen.plan.runs import Runs, runs_of
from flashgen.reference import weigh
from flashgen.symbolic import trace
from flashgen.validate import validate
from support.variants import ROOT, linear_specs


def of_features(number: int) -> Tensor:
    """A decay for each of so many features."""
    return Tensor("decay", ("batch", "num_kv_heads", "kv_len", number))


GOOD = AttentionSpec(head_dim=64, mask=causal(), normaliser=linear(elu_plus_one()))
GAIN = Float("gain", 1.0)
DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def own_ids(ids: Any) -> Any:
    """A mask that is causal within runs of ids, of any tensor."""

    def own(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

    return own


def findings(**fields: Any) -> list[str]:
    variant = Variant("tiny", replace(GOOD, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": full(), "align": "bottom_right"},
        {"mask": full(), "head_dim": (128, 16)},
        {"mask": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx},
        {"mask": document() & causal()},
        {"mask": causal() & chunked(Int("size", min=1)), "normaliser": linear(relu(), decay=DECAY)},
        {"dtype": "float32", "input_precision": "tf32", "scale": 2.0},
        {"normaliser": linear(relu(), normalise=False, algorithm="linear")},
        {"normaliser": linear(torch.nn.functional.silu)},
        {"targets": ("gfx942", "sm_86")},
        {"blocks": Blocks(BLOCK_M=32, num_stages=(2, 4))},
        {"normaliser": linear(relu(), decay=DECAY)},
        {"normaliser": linear(relu(), decay=of_features(64))},
        {"normaliser": linear(relu(), decay=[-0.1, 0, -math.inf])},
        {"normaliser": linear(relu(), decay=lambda h: -exp2(-h))},
        {"normaliser": linear(relu(), decay=lambda h: -0.5)},
    ],
)
def test_good_fields(fields: dict[str, Any]) -> None:
    assert findings(**fields) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': sums of products of features leave the range of "
         "float16; write 'bfloat16' or 'float32'"),
        ({"head_dim": 136}, "head_dim=136: a program holds a state of features x v_head_dim, of at "
         "most 128 each; write at most 128"),
        ({"head_dim": (64, 256)}, "head_dim=(64, 256): a program holds a state of features x "
         "v_head_dim, of at most 128 each; write at most 128"),
        ({"score": softcap(30.0)}, "score=softcap(30.0): linear attention has weights without a "
         "score function; put it into the feature map, or leave it out"),
        ({"dropout": True}, "dropout=True: linear attention has no weights to drop: a state holds "
         "their sums; leave it out"),
        ({"forms": ("dense", "cache")}, "forms=('dense', 'cache'): linear attention has the dense "
         "form and that of packed sequences alone; write forms=('dense',) or add 'varlen'"),
        ({"blocks": Blocks(BLOCK_N=64)}, "blocks.BLOCK_N=64: a chunk has BLOCK_M rows, and its "
         "state gives the number of warps; pin BLOCK_M and num_stages alone"),
        ({"mask": full(), "normaliser": linear(relu(), decay=of_features(64))}, "mask=full(): a "
         "decay is for keys in the order of queries, and this mask shows later ones; write "
         "causal(), or leave decay out"),
        ({"mask": document() & causal(), "normaliser": linear(relu(), decay=of_features(64))},
         "mask=document() & causal(): with a decay for each feature, a state does not start anew "
         "where a run does yet; write causal() and pass -inf where runs start, or give a decay for "
         "each key"),
        ({"mask": chunked(8) & causal(), "normaliser": linear(relu(), decay=of_features(64))},
         "mask=chunked(8) & causal(): with a decay for each feature, a state does not start anew "
         "where a run does yet; write causal() and pass -inf where runs start, or give a decay for "
         "each key"),
        ({"normaliser": linear(relu(), decay=of_features(32))}, "normaliser=linear(relu(), "
         "decay=decay): a decay for each of 32 features, and a vector has 64; declare the tensor "
         "with 64 in its dims"),
        ({"normaliser": linear(lambda x: [x, x * x, x**3, x**4], decay=of_features(256))},
         "normaliser=linear(feature_map, decay=decay): with a decay for each feature, a vector "
         "has at most 128; give one for each key, or make fewer features"),
        ({"normaliser": linear(favor(256), decay=of_features(256))}, "normaliser=linear("
         "favor(features=256), decay=decay): a decay for each feature is learned, and random "
         "features are drawn anew; give one for each key, or another feature map"),
        ({"normaliser": linear(relu(), algorithm="fast")}, "normaliser=linear(relu(), "
         "algorithm='fast'): 'fast' is no algorithm; write one of None, 'linear', 'quadratic'"),
        ({"normaliser": linear(relu(), normalise=1)}, "normaliser=linear(relu()): normalise is "
         "neither True nor False; write normalise=False, or leave it out"),
        ({"mask": full(), "normaliser": linear(relu(), decay=DECAY)}, "mask=full(): a decay is for "
         "keys in the order of queries, and this mask shows later ones; write causal(), or leave "
         "decay out"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    assert findings(**fields) == [f"specs/tiny.py: tiny: {message}"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x > 0, "feature_map feature_map returned the condition `x > 0`, not a number; "
         "return a number, as where(x > 0, x, 0.0)"),
        (lambda x: None, "feature_map feature_map returned None, not a number; return a number, "
         "as where(x > 0, x, 0.0)"),
        (lambda x: GAIN * x, "feature_map feature_map reads gain, and features depend on x alone; "
         "multiply q and k by it before the call"),
        (lambda x: where(x > 0, x, -torch.inf), "feature_map feature_map may become infinite; "
         "return a finite number"),
    ],
)  # fmt: skip
def test_what_is_no_feature_map(function: Any, message: str) -> None:
    [finding] = findings(normaliser=linear(function))
    assert message in finding


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: h > 0, "decay decay returned Expr(h > 0), not a number; return the logarithm "
         "of a head's decay"),
        (lambda h: GAIN * h, "decay decay reads more than h; declare a Tensor of dims ('batch', "
         "'num_kv_heads', 'kv_len')"),
        (lambda h: 0.5, "decay decay is 0.5, above 0; return a number up to 0"),
    ],
)  # fmt: skip
def test_what_is_no_decay_of_a_head(function: Any, message: str) -> None:
    [finding] = findings(normaliser=linear(relu(), decay=function))
    assert message in finding


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (-0.5, "linear: decay=-0.5; give a number for each head of k in a tuple, a function"),
        ((-0.5, 0.5), "linear: decay holds 0.5; give logarithms, numbers up to 0"),
        ((math.nan,), "linear: decay holds nan; give"),
        (Tensor("decay", ("num_q_heads",)), "declare a Tensor of dims ('batch', 'num_kv_heads', "
         "'kv_len') and of float32"),
        (Tensor("decay", ("batch", "num_kv_heads", "kv_len"), "bfloat16"), "and of float32"),
    ],
)  # fmt: skip
def test_what_is_no_decay(decay: Any, message: str) -> None:
    with pytest.raises(MaskError, match=re.escape(message)):
        linear(relu(), decay=decay)


def test_decays_are_told_apart_by_what_they_compute() -> None:
    decays = (None, DECAY, (-0.1,), (-0.2,), lambda h: -h)
    normalisers = [linear(relu(), decay=decay) for decay in decays]
    assert len({replace(GOOD, normaliser=normaliser).digest for normaliser in normalisers}) == 5
    assert linear(relu(), decay=lambda h: -1 * h) == normalisers[4]
    assert replace(GOOD, normaliser=normalisers[1]).params == (DECAY,)


def test_only_functions_are_feature_maps() -> None:
    with pytest.raises(MaskError, match="linear: feature_map=3 is no feature map; write identity"):
        linear(3)


@pytest.mark.parametrize(
    ("function", "never"),
    [
        (elu_plus_one(), True),
        (relu(), True),
        (lambda x: x * x, True),
        (identity(), False),
        (lambda x: x + 1.0, False),
        (lambda x: where(x > 0, x, x + 1.0), False),
    ],
)
def test_what_is_never_negative(function: Any, never: bool) -> None:
    """A map that is taken for never negative would have an LSE that is NaN."""
    assert as_feature_map(function).never_negative == never


def test_maps_are_told_apart_by_what_they_compute() -> None:
    mine = as_feature_map(lambda x: where(x > 0.0, x, 0.0))
    assert mine == relu() and hash(mine) == hash(relu()) and mine != elu_plus_one()
    plain = replace(GOOD, normaliser=linear(relu(), normalise=False))
    specs = [GOOD, replace(GOOD, normaliser=linear(relu())), plain]
    assert len({spec.digest for spec in specs}) == 3


def test_the_exponential_is_a_power_of_2() -> None:
    """The instruction flushes numbers that are subnormal, which takes three others less."""
    plan = LinearPlan(lower(GOOD, "tiny"))
    assert "tl.math.exp2(" in plan.map and "tl.math.exp2(" in plan.slope


def test_what_looks_at_scores_refuses_it() -> None:
    name = "linear_elu_d128"
    with pytest.raises(FlashgenError, match="linear attention visits no tiles of scores"):
        next(explain([ROOT / "specs" / f"{name}.py"], None, Asked(), ROOT / "generated"))
    with pytest.raises(ValueError, match="linear attention has no scores to weigh"):
        weigh(torch.zeros(1, 1, 1, 1), GOOD.normaliser)


def test_it_ships() -> None:
    assert linear_specs()


IDS = Tensor("ids", ("batch", "q_len"), "int32")
OTHERS = Tensor("others", ("batch", "kv_len"), "int32")
OF_ALL, SIZE = Tensor("ids", ("kv_len",), "int32"), Int("n", min=1)


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        (document() & causal(), Runs(document().params[0].sym, True, True)),
        (causal() & document(OF_ALL), Runs(OF_ALL.sym, False, True)),
        (
            lambda b, h, q_idx, kv_idx: (IDS[b, kv_idx] == IDS[b, q_idx]) & (kv_idx <= q_idx),
            Runs(IDS.sym, True, False),
        ),
        (chunked(7) & causal(), Runs(length=7)),
        (chunked(SIZE) & causal(), Runs(length=SIZE.sym)),
        (document(), None),
        (chunked(7), None),
        (document() & chunked(7) & causal(), None),
        (document() & document(OTHERS) & causal(), None),
        (document(IDS, OTHERS) & causal(), None),
        (document() & sliding_window(8, 0), None),
        (document() & ~causal(), None),
        (document() & causal() & (lambda b, h, q_idx, kv_idx: IDS[b, kv_idx] != 3), None),
        (lambda b, h, q_idx, kv_idx: (IDS[h, q_idx] == IDS[h, kv_idx]) & (kv_idx <= q_idx), None),
        (lambda b, h, q_idx, kv_idx: (q_idx // 4 == kv_idx // 5) & (kv_idx <= q_idx), None),
    ],
)
def test_what_has_runs(mask: Any, runs: Runs | None) -> None:
    """A mask that is taken for runs is computed by states: it has to be nothing else."""
    assert runs_of(trace(as_mask(mask)).expr) == runs


def test_a_causal_module_is_for_equal_lengths() -> None:
    """Also where the mask has a meaning for others: its states have as many keys as queries."""
    for mask in (causal(align="top_left"), lambda b, h, q_idx, kv_idx: kv_idx <= q_idx):
        plan = lower(replace(GOOD, mask=mask), "tiny")
        assert plan.equal_lengths and "for equal lengths only; pass as many" in plan.refuses_lengths
    assert not lower(replace(GOOD, mask=full()), "tiny").equal_lengths
