"""Copies of modules that make products alone, or load alone, and the table of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import power
from benchmarks.products import COPIES, LOADS, PRODUCTS, alone, products_table
from support.variants import GENERATED, gluon_specs


def forward_of(text: str) -> str:
    """The Gluon forward kernel's part of a module."""
    return text[text.index("\nOUT") : text.index("\ndef _attention_hopper(")]


@pytest.mark.parametrize("what", COPIES)
@pytest.mark.parametrize("name", [*gluon_specs()])
def test_a_copy_of_every_module(name: str, what: str) -> None:
    text = (GENERATED / f"{name}.py").read_text()
    copy = alone(text, what)
    compile(copy, name, "exec")
    steps = forward_of(copy)
    steps = steps[steps.index("def _step(") : steps.index("def _consumer(")]
    assert "exp2" not in steps and "_start_scores(" in steps and "_pack(scores)" in steps
    assert "redone = _any(" not in copy
    assert ("warpgroup_mma(" in forward_of(copy)) == (what == PRODUCTS)
    # What is behind the forward kernel is as it was.
    assert copy[copy.index("\ndef attention(") :] == text[text.index("\ndef attention(") :]


def test_a_module_without_a_gluon_kernel() -> None:
    with pytest.raises(ValueError, match="no Gluon forward kernel"):
        alone((GENERATED / "causal_fp32_d64.py").read_text(), PRODUCTS)


def test_the_table() -> None:
    row = {
        "cell": "window_d128 S=16384",
        "ms": {"flashgen": [2.0], PRODUCTS: [1.6]},
        "tflops": {"flashgen": [400.0, 404.0], PRODUCTS: [500.0, 505.0]},
    }
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    table = products_table({"environment": environment, "cells": [row]})
    assert "| cell | kernel | products alone | products |" in table
    assert "| window_d128 S=16384 | 400 404 | 500 505 | 0.80 |" in table
    assert LOADS not in table
    assert "pJ" not in table


def test_energy_goes_by_the_rates_under_load() -> None:
    row = {
        "cell": "window_d128 S=16384",
        "ms": {"flashgen": [2.0], PRODUCTS: [1.6]},
        "tflops": {"flashgen": [400.0], PRODUCTS: [500.0]},
        "sustained_ms": {"flashgen": [2.2], PRODUCTS: [1.8]},
        "sustained_tflops": {"flashgen": [340.0, 360.0], PRODUCTS: [450.0]},
        "watts": {"flashgen": [698, 702]},
    }
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    table = products_table({"environment": environment, "cells": [row]})
    assert "| window_d128 S=16384 | 698 702 W, 2.000 pJ | - |" in table


def test_power_is_read_once_the_load_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's mean of a second says nothing of a call before it has run for one."""
    clock, made = [0.0], []

    def call() -> None:
        made.append(clock[0])
        clock[0] += 0.01

    def drawn() -> int:
        return 700_000 if clock[0] > 1.0 else 90_000

    monkeypatch.setattr(power.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "power_draw", drawn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert power.watts(call) == 700
    assert made[-1] > 1.5
