"""Compiling in background processes, which stand still while the process that began them measures.

Tasks begin in their order, a process each, and fill caches on disk. A task that is stuck, fails or
kills its process is told by its outcome; nothing waits for it. `benchmarks.turns` says what can be
measured meanwhile. This module imports no torch: its processes import what their tasks need.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

from flashgen.errors import first_line

#: The share of a run's limit that a task may take if others wait for its process, and the seconds
#: that it may take at all; then its process is killed.
ALLOWED_SHARE, ALLOWED_SECONDS = 0.6, 300.0

#: Seconds of a pause after which the processes are killed, and their tasks begin anew: whoever
#: measures may wait for a lock of a cache that a process holds. The locks of the dead are free.
STALLED = 60.0

#: Seconds until a process that was told to stand still does.
STOPS_WITHIN = 1.0

#: Seconds until one that was killed is gone, with its memory of a GPU.
GONE_WITHIN = 5.0

#: What an error says, in small letters, that comes of too many processes on a GPU.
OUT_OF_MEMORY = "out of memory"

_DIES_WITH_PARENT = 1  # prctl(2), PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Task:
    """A call in another process.

    Attributes:
        key: its name, of which there is one.
        function: of a module; it returns its error, or nothing.
        arguments: what it is called with, which can be pickled.
    """

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
        problem: its error, or nothing.
        died: whether its process died, as would the one that measures.
        late: whether its process was killed, since it took too long.
    """

    problem: str = ""
    died: bool = False
    late: bool = False


@dataclass(eq=False)
class _Worker:
    """A process, the end of its pipe, and its task with when it began, pauses left out."""

    process: Any
    pipe: Connection
    task: Task | None = None
    began: float = 0.0
    evicted: bool = field(default=False)

    def signal(self, which: signal.Signals) -> None:
        """Sends a signal to the process and what it started, such as an assembler."""
        pid = self.process.pid
        with suppress(ProcessLookupError):
            # It makes its group first of all; until then it has started nothing.
            if os.getpgid(pid) == pid:
                os.killpg(pid, which)
            else:
                os.kill(pid, which)

    def end(self) -> None:
        """Kills the process, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.pipe.close()


class Early:
    """Processes that do tasks in the background, in their order; a context manager.

    Args:
        tasks: what is to be done, the most important first.
        jobs: how many processes; with 0 all tasks count as done, and nothing is done.
        limit: seconds of the whole run.
        began: when the run began, of `time.perf_counter`; now if it is not given.
    """

    def __init__(
        self, tasks: Iterable[Task], jobs: int, limit: float, began: float | None = None
    ) -> None:
        self.limit = limit
        self._began = time.perf_counter() if began is None else began
        self._jobs = jobs
        self._waiting = list(tasks)
        self._outcomes: dict[Hashable, Outcome] = {}
        self._again: set[Hashable] = set()
        self._workers: list[_Worker] = []
        if jobs < 1:
            self._outcomes = {task.key: Outcome() for task in self._waiting}
            self._waiting = []

    @property
    def passed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    @property
    def is_over(self) -> bool:
        """Whether no task is left, waiting or running."""
        return not self._waiting and not self._workers

    def outcome(self, key: Hashable) -> Outcome | None:
        """What became of a task; None while it waits or runs."""
        return self._outcomes.get(key)

    @property
    def unfinished(self) -> list[Hashable]:
        """Keys of the tasks that wait or run."""
        running = [x.task.key for x in self._workers if x.task is not None]
        return running + [task.key for task in self._waiting]

    def poll(self, seconds: float = 0.0) -> None:
        """Takes what processes say, for so long at most, and gives them what is next."""
        self._begin()
        busy = {worker.pipe: worker for worker in self._workers}
        # A process that dies closes its pipe, too.
        for pipe in connection.wait([*busy], seconds):
            self._hear(busy[pipe])  # type: ignore[index]
        for worker in list(self._workers):
            share = ALLOWED_SHARE * self.limit if self._waiting else ALLOWED_SECONDS
            allowed = min(share, ALLOWED_SECONDS)
            if worker.task is not None and time.perf_counter() - worker.began > allowed:
                self._drop(worker, Outcome(f"not compiled within {allowed:.0f} s", late=True))
        self._begin()

    def _begin(self) -> None:
        """Gives tasks to processes that have none, and ends those for which there are none."""
        for worker in [x for x in self._workers if x.task is None]:
            if self._waiting:
                self._give(worker)
            else:  # what it has on the GPU is then free
                self._workers.remove(worker)
                worker.end()
        while self._waiting and len(self._workers) < self._jobs:
            ours, theirs = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=_work, args=(theirs,))
            # Kernels are compiled in the process, not in a pool of its own.
            with patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"):
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
            self._give(self._workers[-1])

    def _give(self, worker: _Worker) -> None:
        worker.task, worker.began = self._waiting.pop(0), time.perf_counter()
        with suppress(BrokenPipeError):  # it died, which is heard next
            worker.pipe.send((worker.task.function, worker.task.arguments))

    def _hear(self, worker: _Worker) -> None:
        """Takes the outcome of a process's task, or notes that the process is no more."""
        assert worker.task is not None
        try:
            problem = str(worker.pipe.recv() or "")
        except (EOFError, ConnectionResetError):
            if worker.evicted:
                self._waiting.insert(0, worker.task)
                worker.task = None
            self._drop(worker, Outcome("its process died while compiling", died=True))
            return
        crowded = OUT_OF_MEMORY in problem.lower()
        if crowded and worker.task.key not in self._again:  # of a GPU with many processes
            self._again.add(worker.task.key)
            self._waiting.append(worker.task)
        else:
            self._note(worker.task.key, Outcome(problem))
        worker.task = None
        if "CUDA error" in problem:  # such a process is of no use any more
            self._drop(worker, Outcome())

    def _drop(self, worker: _Worker, outcome: Outcome) -> None:
        """Kills a process; its task, if it has one, gets an outcome."""
        self._workers.remove(worker)
        worker.end()
        if worker.task is not None:
            self._note(worker.task.key, outcome)

    def _note(self, key: Hashable, outcome: Outcome) -> None:
        self._outcomes[key] = outcome
        if outcome.problem:
            print(f"compiling beforehand: {key}: {outcome.problem}", file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No process runs within, nor anything that it started."""
        started = time.perf_counter()
        stalled = threading.Timer(STALLED, self.evict)
        stalled.daemon = True
        try:
            for worker in self._workers:
                worker.signal(signal.SIGSTOP)
            until = time.perf_counter() + STOPS_WITHIN
            while time.perf_counter() < until and any(map(_runs, self._workers)):
                time.sleep(0.002)
            stalled.start()
            yield
        finally:
            stalled.cancel()
            for worker in self._workers:
                worker.began += time.perf_counter() - started
                worker.signal(signal.SIGCONT)

    def evict(self) -> None:
        """Kills all processes, also within a pause; their tasks begin anew.

        What they compiled is on disk; what they hold on the GPU is free.
        """
        for worker in list(self._workers):
            worker.evicted = True
            worker.signal(signal.SIGKILL)

    @property
    def has_processes(self) -> bool:
        """Whether there are processes, which may hold memory of a GPU."""
        return bool(self._workers)

    def make_room(self) -> None:
        """As `evict`, and returns once the processes are gone."""
        self.evict()
        for worker in self._workers:
            worker.process.join(GONE_WITHIN)

    def __enter__(self) -> Early:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kills all processes; tasks that have not ended are told."""
        if left := self.unfinished:
            print(f"not compiled in time: {', '.join(map(str, left))}", file=sys.stderr, flush=True)
        for worker in self._workers:
            worker.end()
        self._workers, self._waiting = [], []


def _runs(worker: _Worker) -> bool:
    """Whether a process has not been stopped yet, as Linux tells."""
    try:
        told = Path(f"/proc/{worker.process.pid}/stat").read_text()
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X")


def _work(pipe: Connection) -> None:
    """What a process does: tasks, until it is killed or its parent is no more."""
    os.setpgid(0, 0)
    with suppress(OSError, AttributeError):  # also if the parent is killed while this stands still
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    while True:
        try:
            function, arguments = pipe.recv()
            said = function(*arguments)
        except EOFError:
            return
        except Exception as error:
            said = first_line(error)
        if torch := sys.modules.get("torch"):
            with suppress(Exception):
                torch.cuda.empty_cache()
        pipe.send(said)
