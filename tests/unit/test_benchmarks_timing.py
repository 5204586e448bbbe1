"""What surrounds a measurement: sustained timing, and compiling beforehand."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from benchmarks import cells, compiling, timing
from benchmarks.cells import Cell


def test_sustained_timing_is_the_mean_after_a_load(monkeypatch):
    """On a clock that a call moves by 2 ms, or by 4 once 350 ms of load have passed."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        clock[0] += 2.0 if clock[0] < 350 else 4.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert timing.sustained_ms(call) == 4.0
    assert clock[0] == 2 * (1 + 5 + 175 - 6) + 4 * 6 + 4 * 125


def test_compiling_beforehand_goes_on_where_a_peer_fails(monkeypatch):
    called = []

    @contextmanager
    def refusing(cell, attention, inputs):
        raise RuntimeError("No available kernel.")
        yield

    @contextmanager
    def willing(cell, attention, inputs):
        yield lambda: called.append(inputs[0].shape)

    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 32)
    monkeypatch.setattr(compiling, "PEERS", {"flashgen": refusing, "FlexAttention": willing})
    cell = Cell("causal_d16", "causal", 32, 16, 16)
    problem = "causal_d16 S=32, flashgen: RuntimeError: No available kernel."
    assert compiling.compile_cell(cell, "cpu") == [problem]
    assert called == [(2, 2, 32, 16)]
    assert compiling.compile_all([cell], jobs=0) == []
