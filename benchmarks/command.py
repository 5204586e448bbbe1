"""A run of a benchmark: its cells again and again, the results written as they come."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy import wrong_cells
from benchmarks.cells import Cell
from benchmarks.compiling import compile_all
from benchmarks.measuring import measure
from benchmarks.peers import BENCHMARK_MODULES, PEERS, peers_of
from benchmarks.record import environment, layout, new_row, protocol, target
from benchmarks.timing import TIMERS
from flashgen.build import Options, Progress, build
from flashgen.files import write_atomically

SPECS = Path(__file__).parent / "specs"


def run(
    benchmark: str,
    every_cell: Sequence[Cell],
    description: str | None,
    show: Callable[[Mapping[str, Any]], str],
) -> int:
    """Measures the cells that the command line asks for; status 1 where a module is wrong.

    Args:
        benchmark: its name, ``"forward"``.
        every_cell: what can be asked for.
        description: of the command, for its help.
        show: the results as a table.
    """
    options = _arguments(benchmark, every_cell, description)
    if not torch.cuda.is_available():
        print(f"benchmarks.{benchmark} measures a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")  # float32 may use the tf32 units
    device = torch.device("cuda")
    cells = [cell for cell in every_cell if options.only in cell.name]
    _build_missing_modules(cells)
    started = time.perf_counter()
    for problem in compile_all(cells, options.jobs):
        print(f"compiling beforehand: {problem}", file=sys.stderr)
    print(f"compiled beforehand in {time.perf_counter() - started:.0f} s", flush=True)
    rows = [new_row(cell) for cell in cells]
    head = {
        "benchmark": benchmark,
        "environment": environment(device),
        "protocol": protocol(),
    }
    for repetition in range(options.repeat):
        for cell, row in zip(cells, rows, strict=True):
            peers = {name: PEERS[name] for name in peers_of(cell, options.fa4)}
            measure(cell, row, peers, repetition, device, TIMERS)
            seconds = time.perf_counter() - started
            print(f"{seconds:4.0f} s {_progress(repetition, row)}", flush=True)
            # After every cell: a run that is cut off keeps them.
            measured = [row for row in rows if row["ms"]]
            write_atomically(options.json, layout(head | {"cells": measured}))
    print(f"\n{show(json.loads(options.json.read_text()))}")
    wrong = wrong_cells(rows)
    if wrong:
        print(f"WRONG OUTPUT of flashgen's module: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _build_missing_modules(cells: Sequence[Cell]) -> None:
    """Builds and tunes what the cells need of benchmarks/specs, unless it is up to date."""
    files = [SPECS / f"{name}.py" for name in {cell.module: None for cell in cells}]
    paths = [file for file in files if file.exists()]
    for built in build(paths, Options(BENCHMARK_MODULES, (target(),)), Progress()):
        print(f"{built.variant}: {'built' if built.chosen else 'up to date'}", flush=True)


def _progress(repetition: int, row: Mapping[str, Any]) -> str:
    """TFLOP/s of this repetition, median and sustained."""
    rates, sustained = row["tflops"], row["sustained_tflops"]
    shown = "  ".join(
        f"{name} {rates[name][-1]:.0f} {sustained[name][-1]:.0f}"
        for name in rates
        if name in sustained
    )
    return f"[{repetition + 1}] {row['cell']:28} {shown}"


def _arguments(
    benchmark: str, cells: Sequence[Cell], description: str | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"python -m benchmarks.{benchmark}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--repeat", type=int, default=2, help="times to measure the whole table")
    parser.add_argument("--only", default="", help="a part of the names of the cells to measure")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, (os.cpu_count() or 2) // 2),
        help="processes that compile beforehand; 0 compiles while measuring",
    )
    parser.add_argument("--fa4", action="store_true", help="FlashAttention 4 too, if installed")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    if not any(options.only in cell.name for cell in cells):
        parser.error(f"--only: no cell has {options.only!r} in its name")
    return options
