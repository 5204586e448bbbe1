"""Compiling beforehand: every kernel of a run, by several processes, into the caches on disk.

The process that measures finds the kernels there. FlexAttention takes 5 to 15 s of a CPU core for
each shape, twice that for gradients; FlashAttention 4, which keeps its kernels on disk on request,
takes as long for each attention. In sequence, compiling would take longer than all measuring.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from unittest.mock import patch

import torch

from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import Cell
from benchmarks.inputs import make_inputs
from benchmarks.passes import PASSES
from benchmarks.peers import peers_of

#: Peers whose compilers keep kernels on disk, the slowest first, and whether each sequence length
#: has its own kernels.
CACHED = {"FlexAttention": True, "FA4": False, "flashgen": False, "flashgen, portable": False}

#: Read by FlashAttention 4 when it is imported.
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def compile_all(
    cells: Sequence[Cell],
    jobs: int,
    which: str = "forward",
    *,
    with_fa4: bool = False,
    without: Collection[str] = (),
) -> list[str]:
    """Calls the peers of `CACHED` once on each cell with its own kernels, in so many processes.

    Args:
        cells: what will be measured.
        jobs: processes; with 0 nothing is compiled beforehand.
        which: the name of the pass.
        with_fa4: whether FlashAttention 4 is there.
        without: peers that are not measured.

    Returns:
        A line for each error; the errors recur when measuring, with more details.
    """
    if jobs < 1:
        return []
    calls = [call for call in calls_to_compile(cells, with_fa4, which) if call[0] not in without]
    os.environ[FA4_CACHE] = "1"
    # A worker's kernels are compiled in the worker, not in a pool of its own.
    in_workers = patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1")
    spawned = get_context("spawn")
    try:
        with in_workers, ProcessPoolExecutor(min(jobs, len(calls)), mp_context=spawned) as pool:
            problems = list(pool.map(partial(compile_call, which=which), *zip(*calls, strict=True)))
    except BrokenProcessPool as error:
        return [f"a compiling process died: {error}"]
    return [problem for problem in problems if problem]


def calls_to_compile(
    cells: Sequence[Cell], with_fa4: bool, which: str = "forward"
) -> list[tuple[str, Cell]]:
    """Peers with cells whose kernels differ; the slowest to compile come first."""
    calls = {}
    for name, each_length in CACHED.items():
        for cell in cells:
            if name in peers_of(cell, with_fa4, which):
                calls.setdefault((name, cell.module, each_length and cell.seq_len), cell)
    return [(name, cell) for (name, *_), cell in calls.items()]


def compile_call(name: str, cell: Cell, which: str = "forward", device_type: str = "cuda") -> str:
    """Calls a peer on a cell, in this process; returns the error, or nothing."""
    torch.set_float32_matmul_precision("high")  # as where it is measured: part of cache keys
    device = torch.device(device_type)
    try:
        attention = ATTENTIONS[cell.attention](cell.seq_len, device)
        inputs = make_inputs(cell, device)
        with torch.no_grad(), PASSES[which].peers[name](cell, attention, inputs) as call:
            call()
    except Exception as error:
        return f"{cell.name}, {name}: {type(error).__name__}: {error}"
    return ""
