"""Runs of benchmarks whose time passes faster where nothing is left to wait for."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.early import Early, Task

#: Seconds that pass for each one.
TIMES = 10.0


class Hurried(Early):
    """An `Early` of which so many tasks never end, and each of these has a process.

    Until all others have ended time passes as ever, so that a slow machine changes nothing.
    """

    def __init__(self, tasks: Iterable[Task], jobs: int, limit: float, stuck: int = 1) -> None:
        super().__init__(tasks, jobs, limit)
        self._stuck = stuck

    def poll(self, seconds: float = 0.0) -> None:
        before = self.passed
        super().poll(seconds)
        if 0 < len(self.unfinished) <= self._stuck and not self._waiting:
            ahead = (TIMES - 1) * (self.passed - before)
            self._began -= max(0.0, min(ahead, self.limit - self.passed))  # to the limit, not past
