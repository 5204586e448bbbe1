"""Lanes: calls in turns on two streams of a GPU, beside the current one.

The last tiles of a call leave SMs idle, which the next call takes. The first stream has priority:
of two calls that could begin, that one does which was issued first, and the other fills up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

#: Events behind calls, and the arguments of these.
Mark = tuple[list[Any], list[Any]]


class Lanes:
    """Streams for calls that do not depend on one another.

    A call sees what the current stream has computed before it. What calls return may be used on
    the current stream after `join`. Each call of a lane waits for the current stream, so that it
    writes over no memory that a result was freed from, while the current stream still reads it.
    A call alone, and calls on a CPU, run on the current stream.

    Args:
        device: where calls run.
        calls: how many there are until the `join`.
    """

    def __init__(self, device: torch.device, calls: int) -> None:
        self._lanes = _streams(device) if device.type == "cuda" and calls > 1 else ()
        self._current: Any = torch.cuda.current_stream(device) if self._lanes else None
        self._turn = 0
        self._kept: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a function returns, from the next lane.

        Its arguments live until the `join`: their memory would be given to others while a lane
        still reads it.
        """
        if not self._lanes:
            return function(*arguments, **named)
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        self._kept.append(arguments)
        lane.wait_stream(self._current)
        with torch.cuda.stream(lane):
            return function(*arguments, **named)

    def mark(self) -> Mark:
        """The calls since the last mark."""
        kept, self._kept = self._kept, []
        return [lane.record_event() for lane in self._lanes], kept

    def join(self, mark: Mark | None = None) -> None:
        """Lets the current stream wait for the calls until a mark, or for all."""
        events, kept = mark or self.mark()
        for event in events:
            self._current.wait_event(event)
        kept.clear()


@cache
def _streams(device: torch.device) -> tuple[Any, ...]:
    return tuple(
        torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        for priority in (-1, 0)
    )
