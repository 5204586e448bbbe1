"""The benchmark of packed sequences on the CPU: what it calls, what it notes, and its table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import varlen
from benchmarks.command import SPECS
from benchmarks.varlen import PACKINGS, TOKENS, Packing, measure, new_row, varlen_table
from flashgen.loader import load
from support.variants import rendered_module

CPU = torch.device("cpu")
SAME = Packing("same", (5, 0, 40), (5, 0, 40), 4, 2)
CROSS = Packing("cross", (5, 0, 7), (9, 3, 40), 2, 2)
pytestmark = pytest.mark.filterwarnings("ignore:.*eager reference")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules as they render now; rows in several blocks, and a peer that computes in float64."""
    variants = load([SPECS / f"{x}.py" for x in (varlen.MODULE, varlen.CROSS_MODULE)])
    modules = {variant.name: rendered_module(variant.spec) for variant in variants}
    monkeypatch.setattr(varlen, "load_module", modules.__getitem__)
    monkeypatch.setattr(varlen, "ROWS", 16)


def test_the_packings_differ_and_have_so_many_tokens() -> None:
    assert len({packing.title for packing in PACKINGS}) == len(PACKINGS)
    same = [packing for packing in PACKINGS if packing.module == varlen.MODULE]
    assert {sum(packing.q_lens) for packing in same} == {TOKENS}
    assert all(x <= y for p in PACKINGS for x, y in zip(p.q_lens, p.kv_lens, strict=True))


def test_visible_pairs() -> None:
    seen = [
        torch.ones(n, m).tril(m - n).sum().item()
        for n, m in zip(CROSS.q_lens, CROSS.kv_lens, strict=True)
    ]
    assert CROSS.visible_pairs == sum(seen)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("packing", [SAME, CROSS], ids=lambda packing: packing.name)
def test_a_row_has_both_passes_of_everyone_who_is_right(packing: Packing) -> None:
    row, calls = new_row(packing), []

    def time_ms(call: Any) -> float:
        calls.append(call())
        return 0.5

    for reverse in (False, True):
        measure(packing, row, CPU, with_fa4=False, reverse=reverse, time_ms=time_ms)
    assert row["ms"] == row["backward_ms"] == {"flashgen": [0.5, 0.5]}
    assert 0.0 < row["error"]["flashgen"] < 0.01 and list(row["unavailable"]) == ["varlen_attn"]
    assert calls[0].shape == (sum(packing.q_lens), packing.heads, 128) and len(calls[1]) == 3


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("wrong", range(4))
def test_wrong_results_are_an_error(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = varlen.exact

    def shifted(*given: Any) -> Any:
        return [x * (1.0 + 0.1 * (i == wrong)) for i, x in enumerate(exact(*given))]

    monkeypatch.setattr(varlen, "exact", shifted)
    with pytest.raises(ValueError, match="wrong results"):
        measure(SAME, new_row(SAME), CPU, with_fa4=False, reverse=False, time_ms=lambda call: 1.0)


@pytest.mark.usefixtures("here")
def test_compiling_beforehand_calls_both_passes_and_tells_errors() -> None:
    called: list[str] = []
    for packing in (SAME, CROSS):
        module = varlen.load_module(packing.module)
        hook = module.varlen_attention
        module.varlen_attention = lambda *given, hook=hook: called.append("once") or hook(*given)
        assert varlen.prepare("flashgen", packing, "cpu") == ""
    assert len(called) == 2
    assert varlen.prepare("varlen_attn", SAME, "cpu").startswith("varlen_attn, same, 4/2 heads: ")


def test_the_table() -> None:
    row = new_row(Packing("one", (16384,), (16384,), 16, 2))
    row |= {"ms": {"flashgen": [0.6, 0.8], "FA4": [0.8]}, "unavailable": {"varlen_attn": "no"}}
    row["backward_ms"] = {"flashgen": [2.0], "FA4": [2.5]}
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    text = varlen_table({"environment": environment, "cells": [row]})
    assert "| one, 16/2 heads | 1571, 1374 | 1374, 1100 |" in text
    assert "- varlen_attn: no" in text
