"""Linear attention in a spec: feature maps, what is refused and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Blocks,
    Float,
    causal,
    elu_plus_one,
    full,
    identity,
    linear,
    relu,
    sliding_window,
    softcap,
    where,
)
from flashgen.bench import bench
from flashgen.errors import FlashgenError, MaskError
from flashgen.explain.call import Asked
from flashgen.explain.variant import explain
from flashgen.feature_maps import as_feature_map
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.plan.linear import LinearPlan
from flashgen.reference import weigh
from flashgen.validate import validate
from support.variants import ROOT, linear_specs

GOOD = AttentionSpec(head_dim=64, mask=causal(), normaliser=linear(elu_plus_one()))
GAIN = Float("gain", 1.0)


def findings(**fields: Any) -> list[str]:
    variant = Variant("tiny", replace(GOOD, **fields), "specs/tiny.py")
    return [str(violation) for violation in validate(variant)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": full(), "head_dim": (128, 16)},
        {"mask": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx},
        {"dtype": "float32", "input_precision": "tf32", "scale": 2.0},
        {"normaliser": linear(relu(), normalise=False, algorithm="linear")},
        {"normaliser": linear(torch.nn.functional.silu)},
        {"targets": ("gfx942", "sm_86")},
        {"blocks": Blocks(BLOCK_M=32, num_stages=(2, 4))},
    ],
)
def test_good_fields(fields: dict[str, Any]) -> None:
    assert findings(**fields) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': sums of products of features leave the range of "
         "float16; write 'bfloat16' or 'float32'"),
        ({"mask": sliding_window(8, 0)}, "mask=sliding_window(8, 0): sums over its keys do not "
         "factor, and there is no quadratic kernel yet; write causal() or full(), or another "
         "normaliser"),
        ({"head_dim": 136}, "head_dim=136: a program holds a state of features x v_head_dim, of at "
         "most 128 each; write at most 128"),
        ({"head_dim": (64, 256)}, "head_dim=(64, 256): a program holds a state of features x "
         "v_head_dim, of at most 128 each; write at most 128"),
        ({"align": "bottom_right"}, "align='bottom_right': linear attention with a causal mask is "
         "for as many keys as queries; leave it out"),
        ({"score": softcap(30.0)}, "score=softcap(30.0): linear attention has weights without a "
         "score function; put it into the feature map, or leave it out"),
        ({"dropout": True}, "dropout=True: linear attention has no weights to drop: a state holds "
         "their sums; leave it out"),
        ({"forms": ("dense", "varlen")}, "forms=('dense', 'varlen'): linear attention has the "
         "dense form alone; write forms=('dense',)"),
        ({"blocks": Blocks(BLOCK_N=64)}, "blocks.BLOCK_N=64: a chunk has BLOCK_M rows, and its "
         "state gives the number of warps; pin BLOCK_M and num_stages alone"),
        ({"normaliser": linear(relu(), algorithm="quadratic")}, "normaliser=linear(relu(), "
         "algorithm='quadratic'): there is no quadratic kernel of linear attention yet; leave "
         "algorithm out, or write 'linear'"),
        ({"normaliser": linear(relu(), algorithm="fast")}, "normaliser=linear(relu(), "
         "algorithm='fast'): 'fast' is no algorithm; write one of None, 'linear', 'quadratic'"),
        ({"normaliser": linear(relu(), normalise=1)}, "normaliser=linear(relu()): normalise is "
         "neither True nor False; write normalise=False, or leave it out"),
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
    with pytest.raises(FlashgenError, match=f"{name}: bench compares rates of scores, and linear"):
        bench(name, ROOT / "specs", ROOT / "generated")
    with pytest.raises(ValueError, match="linear attention has no scores to weigh"):
        weigh(torch.zeros(1, 1, 1, 1), GOOD.normaliser)


def test_it_ships() -> None:
    assert linear_specs()
