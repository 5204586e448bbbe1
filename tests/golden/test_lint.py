"""Modules of variants that nobody thought of are formatted and lint clean, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashgen import (
    AttentionSpec,
    Float,
    Int,
    Tensor,
    alibi,
    causal,
    document,
    elu_plus_one,
    exp2,
    favor,
    feature_sum,
    identity,
    linear,
    relu,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
    softmax_features,
)
from flashgen.plan import lower
from support.combined import combined
from support.variants import ROOT, any_hopper, any_hopper_backward, rendered

RUNS, A_RUN = 8, 8


LENS = Tensor("lens", ("batch",), "int32")
SHIFT = Tensor("shift", ("batch", "num_q_heads", "kv_len"))
NEAR = Tensor("near", ("num_q_heads", "q_len", "kv_len"))
GATE = Tensor("gate", ("num_q_heads", "q_len", None), "bool")
SINKS = Tensor("sinks", ("num_q_heads",))
FORMS = ("dense", "varlen")

#: Between them these print every line of the templates for packed sequences.
PACKED = (
    AttentionSpec(64, mask=causal(), dropout=True, forms=FORMS),
    AttentionSpec(
        (72, 64), "float32", mask=lambda b, h, q, kv: (kv < LENS[b]) & (q % 2 == b % 2), forms=FORMS
    ),
    AttentionSpec(
        64,
        mask=sliding_window(Int("left", 8), 0),
        align="bottom_right",
        score=softcap(Float("cap", 20.0, above=0)),
        normaliser=softmax(sink=SINKS),
        forms=FORMS,
    ),
    AttentionSpec(
        64,
        score=lambda s, b, h, q, kv: s + SHIFT[b, h, kv] + NEAR[h, q, kv],
        normaliser=sigmoid_attention(),
        forms=FORMS,
    ),
    AttentionSpec(
        64, mask=causal(), score=alibi(SINKS), normaliser=softmax(sink=SINKS), forms=FORMS
    ),
)

#: Tiles that kernels decide: by a table of queries and keys, by one of queries and blocks.
DECIDED = (
    AttentionSpec(64, mask=lambda b, h, q, kv: NEAR[h, q, kv] > 0.5),
    AttentionSpec(64, mask=causal() & (lambda b, h, q, kv: GATE[h, q, kv // 64])),
)

_MESH = ("dense", "mesh")
#: The same for parts of a whole.
MESHED = (
    AttentionSpec(64, mask=causal(align="bottom_right"), forms=_MESH),
    AttentionSpec(64, mask=document() & causal(), score=alibi(SINKS), forms=_MESH),
    AttentionSpec(
        (72, 64),
        "float32",
        mask=lambda b, h, q, kv: (kv < LENS[b]) & (q % 2 == b % 2),
        score=lambda s, b, h, q, kv: s + SHIFT[b, h, kv] + NEAR[h, q, kv],
        normaliser=softmax(sink=SINKS),
        forms=_MESH,
    ),
    AttentionSpec(64, score=softcap(5.0), normaliser=sigmoid_attention(), forms=_MESH),
)

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))


def _several(x):
    """Features of whole vectors."""
    return [x / (feature_sum(x * x) + 1.0), x]


#: The same for linear attention.
LINEAR = (
    AttentionSpec(64, mask=causal(), normaliser=linear(elu_plus_one(), decay=DECAY), forms=FORMS),
    AttentionSpec(
        (40, 24),
        "float32",
        mask=causal(),
        normaliser=linear(identity(), decay=DECAY, normalise=False),
        forms=FORMS,
    ),
    AttentionSpec(64, mask=causal(), normaliser=linear(identity()), forms=FORMS),
    AttentionSpec(
        128,
        mask=causal(),
        normaliser=linear(_several, decay=lambda h: -exp2(-4.0 - h), normalise=False),
        forms=FORMS,
    ),
    AttentionSpec(64, normaliser=linear(elu_plus_one()), forms=FORMS),
    AttentionSpec(40, "float32", normaliser=linear(_several, normalise=False), forms=FORMS),
    AttentionSpec((40, 24), normaliser=linear(softmax_features()), forms=FORMS),
    # Over all pairs.
    AttentionSpec(64, mask=document(), normaliser=linear(favor(64)), autocast=True),
    AttentionSpec(
        64,
        "float32",
        mask=causal(),
        align="top_left",
        normaliser=linear(identity(), decay=DECAY, normalise=False),
    ),
    AttentionSpec(
        64,
        mask=causal() & (lambda b, h, q, kv: q - kv < LENS[b]),
        normaliser=linear(relu(), decay=(-0.5, -0.25, 0.0)),
    ),
)


@pytest.mark.parametrize("specs", [MESHED, DECIDED], ids=["parts of a whole", "decided tiles"])
def test_modules_with_gluon_kernels_are_too(specs: Sequence[AttentionSpec], tmp_path: Path) -> None:
    for number, spec in enumerate(specs):
        plan = lower(spec, f"module_{number}")
        text = rendered(plan, any_hopper(plan), any_hopper_backward(plan))
        (tmp_path / f"{plan.name}.py").write_text(text)
    _hold(tmp_path)


def test_modules_for_packed_sequences_are_too(tmp_path: Path) -> None:
    for number, spec in enumerate((*PACKED, *LINEAR)):
        plan = lower(spec, f"packed_{number}")
        text = rendered(plan, any_hopper(plan), any_hopper_backward(plan))
        (tmp_path / f"{plan.name}.py").write_text(text)
    _hold(tmp_path)


@pytest.mark.parametrize("run", range(RUNS))
def test_modules_are_as_ruff_wants_them(run: int, tmp_path: Path) -> None:
    for number in range(run * A_RUN, (run + 1) * A_RUN):
        variant = combined(number)
        plan = variant.plan
        text = rendered(plan, any_hopper(plan), any_hopper_backward(plan))
        (tmp_path / f"{plan.name}.py").write_text(text)
    _hold(tmp_path)


def _hold(tmp_path: Path) -> None:
    for command in (["check", "--output-format=concise"], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "-q", "--no-cache",
             f"--config={ROOT / 'pyproject.toml'}", str(tmp_path)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
