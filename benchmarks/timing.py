"""The time of a call on the GPU: in bursts, in a queue, and under sustained load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import triton

WARMUP_MS, REPETITION_MS = 50, 200
PAUSE_SECONDS = 0.2  # before each median, so that no peer inherits the heat of the last alone
LOAD_MS, SUSTAINED_MS = 350, 250

#: Calls of `queued_ms`; the cycles that the GPU waits for each second in which the CPU queues them,
#: more than there are; and the most that it waits.
QUEUED, CYCLES_OF_SECOND, MOST_CYCLES = 10, 3e9, 400_000_000

#: Milliseconds of a call.
Timer = Callable[[Callable[[], Any]], float]


def median_ms(call: Callable[[], Any]) -> float:
    """The median of calls on a chip that has rested, the L2 cache cleared before each."""
    torch.cuda.synchronize()
    time.sleep(PAUSE_SECONDS)
    ms: float = triton.testing.do_bench(
        call, warmup=WARMUP_MS, rep=REPETITION_MS, return_mode="median"
    )
    return ms


def queued_ms(call: Callable[[], Any]) -> float:
    """The median of calls that wait in the GPU's queue until all are there.

    So the CPU's part of a call is not in it. Nothing clears the L2 cache.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    cycles = (time.perf_counter() - started) * QUEUED * CYCLES_OF_SECOND
    torch.cuda.synchronize()
    event: Callable[..., Any] = torch.cuda.Event
    events = [tuple(event(enable_timing=True) for _ in range(2)) for _ in range(QUEUED)]
    torch.cuda._sleep(int(min(cycles, MOST_CYCLES)))  # type: ignore[no-untyped-call]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in events))


def sustained_ms(call: Callable[[], Any]) -> float:
    """The mean of calls back to back, for `SUSTAINED_MS`, after `LOAD_MS` of the same.

    By then the power limit sets the clock that sustained work has. Nothing clears the L2 cache.
    """
    call()
    estimate = mean_ms(call, 5)
    load, count = (max(1, math.ceil(ms / estimate)) for ms in (LOAD_MS, SUSTAINED_MS))
    for _ in range(load):
        call()
    return mean_ms(call, count)


def mean_ms(call: Callable[[], Any], count: int) -> float:
    """The mean of so many calls back to back, by the GPU's own clock.

    The GPU, not the CPU, waits for work that was queued before.
    """
    event: Callable[..., Any] = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


#: The timers by the name of their figures in a file of results.
TIMERS: dict[str, Timer] = {"ms": median_ms, "sustained_ms": sustained_ms}
