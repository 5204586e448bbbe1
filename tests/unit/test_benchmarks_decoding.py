"""The benchmark of decoding on the CPU: what it calls, what it notes, and its table."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import decoding, record
from benchmarks.call_tables import decoding_table
from benchmarks.decoding import STEPS, Step, measure, tensors_of, ways
from benchmarks.peers import load_module

CPU = torch.device("cpu")
STEP = Step(2, 3, 40)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as it is, not compiled; what it and our module say of that is known."""
    monkeypatch.setattr(decoding, "compiled_flex", lambda: flex_attention)
    warnings.filterwarnings("ignore", "(?s)(flex_attention called|full_d128: tensors on cpu)")


def measured(timer, **options):
    row = {"unavailable": {}}
    asked = {"with_fa4": False, "reverse": False, "timers": {"ms": timer}} | options
    measure(STEP, row, tensors_of(STEP, CPU), **asked)
    return row


def test_the_steps_differ_and_fit() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert Step(16, 1, 8192).bytes == 2 * 16 * 8 * 8192 * 128 * 2  # keys and values
    assert all(step.bytes < 2**34 for step in STEPS)


@pytest.mark.usefixtures("eager")
def test_everyone_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "sdpa_kernel", nullcontext)  # the CPU has neither backend
    qkv = tensors_of(STEP, CPU)
    assert [x.shape for x in qkv] == [(2, 32, 3, 128), (2, 8, 40, 128), (2, 8, 40, 128)]
    found = dict(ways(qkv, with_fa4=False))
    assert list(found) == [
        "flashgen", "flashgen, heads apart", "SDPA cuDNN", "SDPA flash", "FlexAttention",
    ]  # fmt: skip
    results = []
    for way in found.values():
        with way as call:
            results.append(call())
    first, *others = results
    for out in others:
        torch.testing.assert_close(out, first, atol=2e-2, rtol=0)


@pytest.mark.usefixtures("eager")
def test_each_is_timed_and_others_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    module, packs = load_module("full_d128"), []
    original = module._packed_heads

    def timer(call):
        packs.append(module._packed_heads is original)
        return 0.25

    row = measured(timer, reverse=True, with_fa4=True)
    assert row["unavailable"]["FA4"].startswith("ModuleNotFoundError: ")
    assert row["unavailable"]["SDPA cuDNN"].startswith("RuntimeError: ")
    assert {"flashgen", "flashgen, heads apart", "FlexAttention"} <= set(row["ms"])
    assert all(ms == [0.25] for ms in row["ms"].values())
    # In reverse order: flashgen last, its heads apart before that.
    assert packs[-2:] == [False, True] and all(packs[:-2])
    assert module._packed_heads is original


@pytest.mark.usefixtures("eager")
def test_what_is_no_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_module("full_d128")
    monkeypatch.setattr(decoding, "compiled_flex", lambda: lambda q, k, v, enable_gqa: q)
    row = measured(lambda call: 1.0)
    assert row["unavailable"]["FlexAttention"].startswith("ValueError: wrong output")
    monkeypatch.setattr(module, "attention", lambda q, k, v: q)
    with pytest.raises(ValueError, match="wrong output"):
        measured(lambda call: 1.0)


def test_the_table() -> None:
    row = {
        "step": Step(16, 1, 8192).name, "bytes": 3 * 10**8,
        "ms": {"flashgen": [0.1, 0.2], "FA4": [0.3, 0.3]},
        "unavailable": {"SDPA cuDNN": "RuntimeError: no"},
    }  # fmt: skip
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    text = decoding_table({"environment": environment, "cells": [row]})
    assert "| 16 x 1 of 8,192 | 150.0 | 300.0 | 2.00 |" in text
    assert "- SDPA cuDNN: RuntimeError: no" in text


@pytest.mark.usefixtures("eager")
def test_results_say_which_kernel_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "target", lambda: "sm_90")
    on_cpu = {
        "sees_gpu": lambda name: True,
        "STEPS": (STEP,),
        "TIMERS": {"ms": lambda call: 0.5},
        "tensors_of": lambda step, device: tensors_of(step, CPU),
        "environment": lambda device: {
            "gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"
        },
    }  # fmt: skip
    for name, value in on_cpu.items():
        monkeypatch.setattr(decoding, name, value)
    file = tmp_path / "decoding.json"
    monkeypatch.setattr("sys.argv", ["decoding", "--json", str(file)])
    assert decoding.main() == 0
    found = json.loads(file.read_text())
    module = load_module("full_d128")
    assert (found["module"], found["form"]) == ("full_d128", "hopper")
    assert found["config"] == module.HOPPER_CONFIG
    assert len(found["kernel"]) == 64
    assert found["cells"][0]["ms"]["flashgen"] == [0.5, 0.5]
