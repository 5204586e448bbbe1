"""Runs a benchmark: measures its cells repeatedly, and writes each result at once."""

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
from benchmarks.cells import AS_CAPTURED, Cell
from benchmarks.compiling import compile_all
from benchmarks.figures import NORMAL, OWN, of_normal
from benchmarks.inputs import ENCODER, named_inputs
from benchmarks.measuring import measure
from benchmarks.passes import FORWARD_PASS, Pass
from benchmarks.peers import BENCHMARK_MODULES, PEERS, peers_of
from benchmarks.record import environment, new_row, protocol, target
from benchmarks.script import make_parser, sees_gpu, write_results
from benchmarks.timing import TIMERS
from flashgen.build import Options, Progress, build

SPECS = Path(__file__).parent / "specs"


def run(
    benchmark: str,
    every_cell: Sequence[Cell],
    description: str | None,
    show: Callable[[Mapping[str, Any]], str],
    which: Pass = FORWARD_PASS,
    repeat: int = 2,
) -> int:
    """Measures the cells that the command line asks for; status 1 if a module is wrong.

    Args:
        benchmark: its name, ``"forward"``.
        every_cell: the cells that can be asked for.
        description: the command's description, for its help.
        show: makes a table of the results.
        which: the pass that is measured.
        repeat: the number of repetitions, unless the command line gives it.
    """
    options = _arguments(benchmark, every_cell, description, repeat)
    if not sees_gpu(benchmark):
        return 2
    torch.set_float32_matmul_precision("high")  # float32 may use the tf32 units
    device = torch.device("cuda")
    cells = _chosen(every_cell, options.cells)
    if ENCODER not in options.inputs:
        cells = [cell for cell in cells if cell is not AS_CAPTURED]
    _build_missing_modules(cells, which, tune=not options.no_tune)
    started = time.perf_counter()
    for problem in compile_all(
        cells, options.jobs, which.name, with_fa4=options.fa4, without=options.without
    ):
        print(f"compiling beforehand: {problem}", file=sys.stderr)
    print(f"compiled beforehand in {time.perf_counter() - started:.0f} s", flush=True)
    rows = [
        (cell, {**new_row(cell, which), "inputs": name})
        for cell in cells
        for name in options.inputs
    ]
    head = {
        "benchmark": benchmark,
        "environment": environment(device),
        "protocol": protocol(which),
        "inputs": options.inputs,
    }
    for repetition in range(options.repeat):
        for cell, row in rows:
            names = peers_of(cell, options.fa4, which.name)
            peers = {name: which.peers[name] for name in names if name not in options.without}
            measure(cell, row, peers, repetition, device, TIMERS, which)
            seconds = time.perf_counter() - started
            print(f"{seconds:4.0f} s {_progress(repetition, row)}", flush=True)
            # After every cell: a run that is cut off keeps them.
            measured = [row for _, row in rows if row["ms"]]
            write_results(head | {"cells": measured}, options.json)
    print(f"\n{show(of_normal(json.loads(options.json.read_text())))}")
    wrong = wrong_cells(row for _, row in rows)
    if wrong:
        print(f"WRONG RESULTS of flashgen's module: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _build_missing_modules(
    cells: Sequence[Cell], which: Pass = FORWARD_PASS, *, tune: bool = True
) -> None:
    """Builds, and tunes, the cells' modules of benchmarks/specs, unless they are up to date."""
    files = [SPECS / f"{name}.py" for name in {cell.module: None for cell in cells}]
    paths = [file for file in files if file.exists()]
    options = Options(BENCHMARK_MODULES, (target(),), tune=tune, kernels=which.kernels)
    for built in build(paths, options, Progress()):
        print(f"{built.variant}: {'built' if built.chosen else 'up to date'}", flush=True)


def _progress(repetition: int, row: Mapping[str, Any]) -> str:
    """TFLOP/s of this repetition, median and sustained."""
    rates, sustained = row["tflops"], row["sustained_tflops"]
    shown = "  ".join(
        f"{name} {rates[name][-1]:.0f} {sustained[name][-1]:.0f}"
        for name in rates
        if name in sustained
    )
    inputs = "" if row["inputs"] == NORMAL else f"{row['inputs']}  "
    return f"[{repetition + 1}] {row['cell']:28} {inputs}{shown}"


def _chosen(cells: Sequence[Cell], parts: Sequence[str]) -> list[Cell]:
    """The cells whose names contain one of these parts."""
    return [cell for cell in cells if any(part in cell.name for part in parts)]


def _arguments(
    benchmark: str, cells: Sequence[Cell], description: str | None, repeat: int
) -> argparse.Namespace:
    parser = make_parser(benchmark, description, keeps=True)
    parser.add_argument(
        "--repeat",
        type=int,
        default=repeat,
        help=f"times to measure the whole table; {repeat} unless it is given",
    )
    parser.add_argument(
        "--cells",
        "--only",
        nargs="+",
        default=[""],
        metavar="PART",
        help="measure the cells with one of these in their names",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, (os.cpu_count() or 2) // 2),
        help="processes that compile beforehand; 0 compiles while measuring",
    )
    parser.add_argument(
        "--no-tune",
        action="store_true",
        help="modules that are not shipped: what was measured before, or the model's choice",
    )
    parser.add_argument("--fa4", action="store_true", help="FlashAttention 4 too, if installed")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=[name for name in PEERS if name != OWN],
        metavar="PEER",
        help="peers that are not measured, as FlexAttention, which compiles for each shape",
    )
    parser.add_argument(
        "--inputs",
        nargs="+",
        type=named_inputs,
        default=[NORMAL],
        metavar="NAME",
        help="what q, k and v hold, each cell with one after the other: normal, scaled:N, growing,"
        " spike, spike:first, spike:last, encoder",
    )
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    for part in options.cells:
        if not _chosen(cells, [part]):
            parser.error(f"--cells: no cell has {part!r} in its name")
    return options
