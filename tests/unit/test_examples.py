"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("example_gpt", ROOT / "examples" / "gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_learns(gpt):
    losses = gpt.train(steps=15, device="cpu")
    assert losses[0] == pytest.approx(math.log(32), rel=0.15)
    assert losses[-1] < losses[0] / 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_learns_on_a_gpu(gpt):
    losses = gpt.train(steps=15, device="cuda")
    assert losses[-1] < losses[0] / 2


@pytest.mark.filterwarnings("ignore:causal_d64")
def test_gpt_sees_no_token_ahead(gpt):
    torch.manual_seed(0)
    model = gpt.GPT(vocabulary=32, max_len=16)
    tokens = torch.randint(32, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 32
    scores, other = model(tokens), model(changed)
    assert torch.equal(scores[:, :9], other[:, :9])
    assert not torch.equal(scores[:, 9:], other[:, 9:])


def test_the_data_is_what_it_says(gpt):
    tokens = gpt.progressions(8, 12, 32)
    steps = (tokens[:, 1:] - tokens[:, :-1]) % 32
    assert (steps == steps[:, :1]).all()
    assert tokens.min() >= 0 and tokens.max() < 32


def test_quickstart():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "causal_d128 is right on this" in run.stdout
