"""Lanes: calls in turns on two streams of a GPU, beside the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class Lanes:
    """Streams for calls that do not depend on one another.

    A call sees what the current stream has computed before it. What calls return may be used on
    the current stream after `join`. On a CPU calls run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._lanes = _streams(device) if device.type == "cuda" else ()
        self._current: Any = torch.cuda.current_stream(device) if self._lanes else None
        self._turn = 0
        self._marks: dict[int, tuple[list[Any], list[torch.Tensor]]] = {}
        self._kept: list[torch.Tensor] = []

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a function returns, a tuple of tensors, from the next lane."""
        if self._current is None:
            return function(*arguments, **named)
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        lane.wait_stream(self._current)
        with torch.cuda.stream(lane):
            results = function(*arguments, **named)
        for x in results:
            x.record_stream(self._current)  # the lane may not write over what is read here
        return results

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keeps tensors of the current stream that calls read, until the `join` of the next mark.

        Their memory would be given to others while a lane still reads it.
        """
        self._kept.extend(tensors)

    def mark(self, number: int) -> None:
        """Remembers the calls until now by a number."""
        self._marks[number] = [lane.record_event() for lane in self._lanes], self._kept
        self._kept = []

    def join(self, number: int | None = None) -> None:
        """Lets the current stream wait for the calls until a mark, or for all."""
        if number is None:
            number = -1
            self.mark(number)
        events, _ = self._marks.pop(number)
        for event in events:
            self._current.wait_event(event)


@cache
def _streams(device: torch.device) -> tuple[Any, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
