"""Comparisons of speed: contenders take turns, so that none of them runs on a cooler chip.

A turn is some calls of one contender, each timed with a cleared L2 cache, and gives their median.
Each contender has one turn in a round; every second round has the reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import triton

ROUNDS = 11
TURN_MS = 10.0
FEWEST, MOST = 3, 50  # calls of a turn
WARM_CALLS = 3
#: Peers within this factor of the fastest peer's first turn take turns, too.
CLOSE = 1.1

Call = Callable[[], Any]
#: The median of so many calls, in milliseconds.
Turn = Callable[[Call, int], float]


def turn_ms(call: Call, count: int) -> float:
    """The median by CUDA events; calls are queued, and waited for once."""
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    event: Callable[..., Any] = torch.cuda.Event
    events = [[event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        driver.clear_cache(cache)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in events))


def first_turn(call: Call, turn: Turn = turn_ms) -> float:
    """One turn, after calls that compile and warm up."""
    for _ in range(WARM_CALLS):
        call()
    return float(f"{turn(call, _calls_for(turn(call, FEWEST))):.4g}")


def rivals(first: Mapping[str, float], own: str) -> list[str]:
    """The peers that may be the fastest, by first turns."""
    others = {name: ms for name, ms in first.items() if name != own}
    least = min(others.values(), default=0.0)
    return [name for name, ms in others.items() if ms <= CLOSE * least]


def rounds(
    calls: Mapping[str, Call], first: Mapping[str, float], turn: Turn = turn_ms
) -> dict[str, list[float]]:
    """The turns of each contender in `ROUNDS` rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            ms = turn(calls[name], _calls_for(first[name]))
            found[name].append(float(f"{ms:.4g}"))
    return found


def best(ms: Mapping[str, list[float]], own: str) -> tuple[str, float]:
    """The fastest peer by medians, and how many times as fast flashgen is."""
    medians = {name: median(times) for name, times in ms.items() if name != own}
    peer = min(medians, key=lambda name: medians[name])
    return peer, medians[peer] / median(ms[own])


def _calls_for(ms: float) -> int:
    return min(max(round(TURN_MS / ms), FEWEST), MOST)
