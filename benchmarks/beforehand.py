"""Builds and compiles modules and kernels of drawn cells, by several processes, beforehand.

Kernels land in the caches on disk of Triton, FlexAttention and FlashAttention 4, modules in a
folder; the process that measures finds both. No other process runs while it measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.attentions import Attention
from benchmarks.compiling import FA4_CACHE
from benchmarks.drawing import Drawn, attention_of
from benchmarks.figures import OWN
from benchmarks.inputs import make_inputs
from benchmarks.passes import differentiated
from benchmarks.peers import PEERS, Call, Peer, load_file
from benchmarks.record import target
from flashgen.build import Options, Progress, build

#: Peers that compile for a cell; SDPA's kernels are compiled already.
COMPILED = ("FlexAttention", "FA4")

#: Where FlashAttention 4 beat FlexAttention in every committed cell, by factors of 1.2 to 2.3.
FA4_AHEAD = ("full", "causal", "window")

_LOADED: dict[Path, ModuleType] = {}


def own_module(cell: Drawn, folder: Path, gpu: str) -> ModuleType:
    """The module of a cell, with the model's configuration; built once, and loaded once.

    Args:
        cell: the cell.
        folder: where specs and modules are.
        gpu: the architecture, ``"sm_90"``.

    Raises:
        FlashgenError: the module cannot be built.
    """
    published = folder / "generated" / f"{cell.module}.py"
    if published not in _LOADED:
        if not published.exists():
            spec = folder / "specs" / f"{os.getpid()}" / f"{cell.module}.py"
            spec.parent.mkdir(parents=True, exist_ok=True)
            spec.write_text(cell.spec)
            list(build([spec], Options(published.parent, (gpu,), tune=False), Progress()))
        _LOADED[published] = load_file(published, f"benchmarks.drawn.{cell.module}")
    return _LOADED[published]


def own_peer(folder: Path) -> Peer:
    """A peer that calls the module of a cell in this folder, built now if it is missing."""

    @contextmanager
    def entered(cell: Any, attention: Attention, inputs: Any) -> Iterator[Call]:
        module = own_module(cell, folder, target())
        yield lambda: module.attention(*inputs, **attention.parameters)

    return entered


def prepare(
    cells: Sequence[Drawn],
    peer: str,
    folder: Path,
    device_type: str = "cuda",
    *,
    backward: bool = False,
) -> str:
    """Calls a peer once on each of these cells, in this process; returns the errors.

    Args:
        cells: cells of one module.
        peer: the peer's name.
        folder: where specs and modules are.
        device_type: ``"cuda"``, or ``"cpu"`` in tests.
        backward: whether its backward pass is called too.
    """
    torch.set_float32_matmul_precision("high")  # as where it is measured
    device = torch.device(device_type)
    for cell in cells:
        try:
            if device_type == "cuda":  # also after a call that did not end well
                torch.cuda.empty_cache()
            attention, inputs = attention_of(cell, device), make_inputs(cell, device)
            called = own_peer(folder) if peer == OWN else PEERS[peer]
            if backward:
                called = differentiated(peer, called)
            with torch.no_grad(), called(cell, attention, inputs) as call:
                call()
            if device_type == "cuda":  # an error of a kernel is attributed to this cell
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:
            return f"{cell.name}, {peer}: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def takes_part(peer: str, cell: Drawn, others: Container[str]) -> bool:
    """Whether a peer may be the fastest of a cell: FlexAttention is not if FA4 is ahead of it."""
    return not (peer == "FlexAttention" and "FA4" in others and cell.attention in FA4_AHEAD)


def tasks(lot: Sequence[Drawn], peers: Sequence[str]) -> list[tuple[list[Drawn], str]]:
    """The tasks of processes: a module's cells each, or one cell of a peer that compiles."""
    modules: dict[str, list[Drawn]] = {}
    for cell in lot:
        modules.setdefault(cell.module, []).append(cell)
    others = [
        ([cell], name)
        for name in COMPILED
        for cell in lot
        if name in peers and takes_part(name, cell, peers)
    ]
    return [*((cells, OWN) for cells in modules.values()), *others]


class Workers:
    """Processes that prepare lots of cells, kept between lots; a context manager."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        os.environ[FA4_CACHE] = "1"
        return self

    def compile(
        self,
        lot: Sequence[Drawn],
        peers: Sequence[str],
        folder: Path,
        seconds: float,
        *,
        backward: bool = False,
    ) -> list[str]:
        """Prepares a lot; returns a line for each error, which will recur when measuring."""
        if self._jobs < 1 or seconds <= 0:
            return []
        until = time.perf_counter() + seconds
        # A worker's kernels are compiled in the worker, not in a pool of its own.
        with patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"))
            futures = [
                self._pool.submit(prepare, *task, folder, backward=backward)
                for task in tasks(lot, peers)
            ]
            _, late = wait(
                futures, None if seconds == float("inf") else until - time.perf_counter()
            )
        if late:
            self._end()
            return [f"{len(late)} were not compiled in time"]
        problems = [problem for problem in map(self._problem, futures) if problem]
        if any("CUDA error" in problem for problem in problems):  # its process is unusable
            self._end()
        return problems

    def _problem(self, future: Future[str]) -> str:
        try:
            return future.result()
        except BrokenProcessPool as error:
            self._end()
            return f"a compiling process died: {error}"

    def _end(self) -> None:
        """Ends the processes, even busy ones; the next lot starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.kill()
            self._pool = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
