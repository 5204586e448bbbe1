"""The benchmark of caches on the CPU: what it calls, what it notes, and its table."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks import cache
from benchmarks.cache import STEPS, Step, cache_table, measure, new_row
from benchmarks.command import SPECS
from flashgen.loader import load
from support.variants import rendered_module

CPU = torch.device("cpu")
STEP = Step(3, 8, 2, 3, 40)
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module as it renders now; the CPU has neither backend of SDPA."""
    [variant] = load([SPECS / f"{cache.MODULE}.py"])
    module = rendered_module(variant.spec)
    monkeypatch.setattr(cache, "load_module", lambda name: module)
    monkeypatch.setattr(cache, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(cache, "CACHES", 3 * STEP.bytes)


def test_the_steps_differ_and_fit() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert Step(16, 32, 8, 1, 8192).bytes == 2 * 16 * 8 * 8192 * 128 * 2  # keys and values


@pytest.mark.usefixtures("here")
def test_a_row_has_everyone_who_is_right() -> None:
    row, counts = new_row(STEP), []

    def time_ms(calls: list[Any]) -> float:
        counts.append(len(calls))
        return 0.5

    for reverse in (False, True):
        measure(STEP, row, CPU, with_fa4=False, reverse=reverse, time_ms=time_ms)
    assert row["ms"] == {name: [0.5, 0.5] for name in ("flashgen", "SDPA cuDNN", "SDPA flash")}
    assert counts == [3] * 6 and not row["unavailable"]


@pytest.mark.usefixtures("here")
def test_wrong_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_exact", lambda *given: torch.ones(2, 8, 128))
    with pytest.raises(ValueError, match="wrong output"):
        measure(STEP, new_row(STEP), CPU, with_fa4=False, reverse=False, time_ms=lambda calls: 1.0)


def test_the_table() -> None:
    row = new_row(Step(16, 32, 8, 1, 8192)) | {"unavailable": {"FA4": "RuntimeError: no"}}
    row["ms"] = {"flashgen": [0.19, 0.19], "SDPA cuDNN": [0.2, 0.2]}
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    text = cache_table({"environment": environment, "cells": [row]})
    assert "| 16 x 1 of 8,192, 32/8 heads | 2.83 | 2.68 |" in text
    assert "- FA4: RuntimeError: no" in text
