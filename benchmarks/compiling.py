"""Compiling beforehand: every kernel of a run, by several processes, into the caches on disk.

The process that measures finds them there. FlexAttention takes 5 to 15 s of a CPU core for each
shape, one after the other longer than all the measuring. FlashAttention 4 keeps no such cache and
compiles where it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import Cell
from benchmarks.measuring import make_inputs
from benchmarks.peers import PEERS

#: Those whose compilers keep what they made on disk.
CACHED = ("flashgen", "FlexAttention")


def compile_all(cells: Sequence[Cell], jobs: int) -> list[str]:
    """Calls the peers of `CACHED` once on each cell, in so many processes of their own.

    Returns:
        what went wrong, a line each; the measuring meets it again and says more.
    """
    if jobs < 1:
        return []
    # A worker's kernels are compiled in the worker, not in a pool of its own.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=get_context("spawn")) as pool:
            problems = list(pool.map(compile_cell, cells))
    except BrokenProcessPool as error:
        return [f"a compiling process died: {error}"]
    finally:
        del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    return [line for lines in problems for line in lines]


def compile_cell(cell: Cell, device_type: str = "cuda") -> list[str]:
    """Calls them on one cell, in this process; what went wrong, a line each."""
    torch.set_float32_matmul_precision("high")  # as where it is measured: part of cache keys
    device = torch.device(device_type)
    problems = []
    for name in CACHED:
        try:
            attention = ATTENTIONS[cell.attention](cell.seq_len, device)
            inputs = make_inputs(cell, device)
            with torch.no_grad(), PEERS[name](cell, attention, inputs) as call:
                call()
        except Exception as error:
            problems.append(f"{cell.name}, {name}: {type(error).__name__}: {error}")
    return problems
