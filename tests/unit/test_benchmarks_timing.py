"""What surrounds a measurement: sustained timing, and compiling beforehand."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks import cells, compiling, timing
from benchmarks.cells import BACKWARD, Cell
from benchmarks.passes import FORWARD_PASS


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


def test_queued_timing_waits_for_the_cpu_and_is_the_median(monkeypatch):
    """On clocks that a call moves: the CPU's by 2 ms, the GPU's by 1 ms, then 2, 3, ..."""
    cpu, gpu, calls, waits = [0.0], [0.0], [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = gpu[0]

        def elapsed_time(self, end):
            return end.at - self.at

    def call():
        calls.append(len(waits))
        cpu[0] += 2e-3
        gpu[0] += len(calls)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: cpu[0])
    assert timing.queued_ms(call) == 8.5  # of 4, 5, ..., 13
    assert calls == [0] * 3 + [1] * 10
    [cycles] = waits
    assert cycles >= 10 * 2e-3 * 2e9  # what ten calls take, on a GPU of 2 GHz


def test_compiling_beforehand_tells_what_fails(monkeypatch):
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
    which = replace(FORWARD_PASS, peers={"flashgen": refusing, "FlexAttention": willing})
    monkeypatch.setitem(compiling.PASSES, "forward", which)
    cell = Cell("causal_d16", "causal", 32, 16, 16)
    problem = "causal_d16 S=32, flashgen: RuntimeError: No available kernel."
    assert compiling.compile_call("flashgen", cell, device_type="cpu") == problem
    assert compiling.compile_call("FlexAttention", cell, device_type="cpu") == ""
    assert called == [(2, 2, 32, 16)]
    assert compiling.compile_all([cell], jobs=0) == []


def test_what_is_compiled_beforehand():
    """FlexAttention for each length, the others once for each attention; the slowest first.

    Of the 11 attentions only flashgen has the one with dropout.
    """
    theirs = [cell for cell in BACKWARD if cell.attention != "dropout"]
    for others in ({"FA4": theirs, "flashgen": BACKWARD}, {"flashgen": BACKWARD}):
        with_fa4 = "FA4" in others
        calls = compiling.calls_to_compile(BACKWARD, with_fa4, "backward")
        names = [name for name, _ in calls]
        assert names == ["FlexAttention"] * 22 + ["FA4"] * 10 * with_fa4 + [
            *["flashgen"] * 11,
            *["flashgen, portable"] * 6,
        ]
        assert len({(name, cell.name) for name, cell in calls}) == len(calls)
        for name, measured in others.items():
            modules = [cell.module for peer, cell in calls if peer == name]
            assert modules == list(dict.fromkeys(cell.module for cell in measured))


def test_compiling_beforehand_in_processes(monkeypatch):
    """Each with its pass; FlashAttention 4 is told to keep what it compiles."""
    given = []

    class Pool:
        def __init__(self, processes, mp_context):
            given.append(processes)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, *arguments):
            assert os.environ[compiling.FA4_CACHE] == "1"
            assert os.environ[threads] == "1"
            return map(function, *arguments)

    def compile_call(name, cell, which):
        given.append((name, which))
        return "a problem" if name == "flashgen" else ""

    threads = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.setenv(compiling.FA4_CACHE, "0")
    monkeypatch.setenv(threads, "7")  # the user's own
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(compiling, "compile_call", compile_call)
    [cell] = [c for c in BACKWARD if c.module == "window_d128"]
    assert compiling.compile_all([cell], 9, "backward", with_fa4=True) == ["a problem"]
    peers = ["FlexAttention", "FA4", "flashgen"]
    assert given == [3, *((name, "backward") for name in peers)]
    assert os.environ[threads] == "7"
