"""Pools of processes that are the ranks of a mesh, with gloo on the CPU."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: How long a rank may take for a task.
SECONDS = 240


class Pool:
    """Ranks that run functions together; they start with the first one and live until `close`.

    Args:
        ranks: their number.
        scratch: a folder for the file that they find one another by.
        interpret: whether kernels run in Triton's interpreter.
    """

    def __init__(self, ranks: int, scratch: Path, *, interpret: bool = False) -> None:
        # A process that has imported torch forks them: each for itself would take seconds to.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["sympy", "torch.distributed.tensor"])  # not yet Triton
        self._tasks = [context.SimpleQueue() for _ in range(ranks)]
        self._results = [context.Queue() for _ in range(ranks)]
        given = ranks, str(scratch / "ranks"), interpret
        queues = zip(self._tasks, self._results, strict=True)
        self._processes = [
            context.Process(target=_serve, args=(rank, *given, *mine), daemon=True)
            for rank, mine in enumerate(queues)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returns of ``function(*arguments)``, an error as its text."""
        for tasks in self._tasks:
            tasks.put((function, arguments))
        return [results.get(timeout=SECONDS) for results in self._results]

    def close(self) -> None:
        """Ends the ranks."""
        for tasks in self._tasks:
            tasks.put(None)
        end = time.monotonic() + 30
        # Not by join: torch's manager of shared memory holds what that waits for a while longer.
        while any(process.is_alive() for process in self._processes) and time.monotonic() < end:
            time.sleep(0.01)


def _serve(rank: int, ranks: int, file: str, interpret: bool, tasks: Any, results: Any) -> None:
    assert "triton" not in sys.modules  # which reads this variable when it is imported
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    torch.set_num_threads(1)
    # Tensors by value: a rank may end before its results are read.
    mp.set_sharing_strategy("file_system")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    while (task := tasks.get()) is not None:
        function, arguments = task
        try:
            results.put(function(*arguments))
        except Exception as error:
            shown = "".join(traceback.format_exception(error))
            results.put(f"{type(error).__name__}: {error}\n{shown}")
    results.close()
    results.join_thread()
    os._exit(0)  # gloo would wait for ranks that have ended
