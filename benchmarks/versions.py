"""Compares the speed of modules of several folders, to measure the effect of a change.

    git worktree add ../before HEAD~1
    python -m benchmarks.versions before=../before/generated after=generated --modules causal_d128

The other folders are compared with the first one. Every module runs the kernels that it would run
for a user, on the same tensors, with the timings of benchmarks.forward; every second repetition
goes through the folders in reverse order. An output that is not attention ends the run with
status 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import torch

from benchmarks.accuracy import Inputs
from benchmarks.attentions import Attention
from benchmarks.cells import BACKWARD, FORWARD, TOKENS, VARIANTS, Cell
from benchmarks.figures import NORMAL, TIMINGS, Document, caption, inputs_of, rates, timings
from benchmarks.inputs import named_inputs
from benchmarks.markdown import header, line
from benchmarks.measuring import measure
from benchmarks.passes import BACKWARD_PASS, PASSES, Pass, differentiated
from benchmarks.peers import Call, Peer, load_copy
from benchmarks.record import environment, kernels_of, protocol
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timing import TIMERS

CELLS = {"forward": (*FORWARD, *VARIANTS), "backward": BACKWARD}


def load_version(label: str, folder: Path, name: str, scratch: Path) -> ModuleType:
    """A module of the folder with this label; see `load_copy`."""
    return load_copy(label, (folder / f"{name}.py").read_text(), name, scratch)


def version_of(module: ModuleType, which: Pass) -> Peer:
    """The pass of a module, as a peer."""

    @contextmanager
    def entered(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
        yield lambda: module.attention(*inputs, **attention.parameters)

    return differentiated("", entered) if which is BACKWARD_PASS else entered


def cells_of(which: str, modules: Iterable[str], lengths: Iterable[int]) -> list[Cell]:
    """A cell for each module and length.

    Raises:
        KeyError: no cell of this pass measures the module.
    """
    known = {cell.module: cell for cell in CELLS[which]}
    return [replace(known[name], seq_len=length) for name in modules for length in lengths]


def new_row(
    cell: Cell, folders: Mapping[str, Path], versions: Mapping[str, ModuleType], which: Pass
) -> dict[str, Any]:
    """A cell before its first measurement; a file that was edited by hand has no digests."""
    kernels = {
        label: kernels_of(module, which, folders[label] / f"{cell.module}.py")
        for label, module in versions.items()
    }
    empty: dict[str, Any] = {name: {} for name in ("ms", "tflops", "error", "unavailable")}
    return {"cell": cell.name, "module": cell.module, "kernels": kernels, **empty}


def versions_table(document: Document) -> str:
    """The rates of all versions for each cell, and their ratios to the first version's."""
    rows = document["cells"]
    first, *others = labels = document["versions"]
    inputs = next((f", inputs {row['inputs']}" for row in rows if inputs_of(row) != NORMAL), "")
    said = f"TFLOP/s of the {document['pass']} pass{inputs}, the repetitions one after the other"
    parts = [f"{said}; {caption(document)}."]
    for timing in timings(rows):
        lines = header(["cell", *labels, *(f"{label} / {first}" for label in others)])
        for row in rows:
            shown = [" ".join(f"{x:.0f}" for x in rates(row, v, timing)) or "-" for v in labels]
            ms = {label: mean(times) for label, times in row.get(timing, {}).items()}
            ratios = [
                f"{ms[first] / ms[label]:.3f}" if {first, label} <= ms.keys() else "-"
                for label in others
            ]
            lines.append(line([row["cell"], *shown, *ratios]))
        parts += [f"By {TIMINGS[timing]}:", "\n".join(lines)]
    if refused := _refused(rows):
        parts += ["Not available:", "\n".join(refused)]
    return "\n\n".join(parts)


def _refused(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"- {row['cell']}, {label}: {reason}"
        for row in rows
        for label, reason in row["unavailable"].items()
    ]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("versions", __doc__)
    parser.add_argument("named", nargs="+", metavar="LABEL=FOLDER", help="of generated modules")
    parser.add_argument("--modules", nargs="+", required=True, metavar="NAME", help="in each")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 16384], metavar="S")
    parser.add_argument("--pass", dest="which", choices=PASSES, default="forward")
    parser.add_argument("--repeat", type=int, default=2, help="times to measure; 2 unless given")
    parser.add_argument(
        "--inputs", type=named_inputs, default=NORMAL, metavar="NAME", help="what q, k and v hold"
    )
    options = parser.parse_args(arguments)
    options.folders = {}
    for text in options.named:
        label, equals, folder = text.partition("=")
        if not (equals and label.isidentifier() and Path(folder).is_dir()):
            parser.error(f"{text}: not LABEL=FOLDER, a name and a folder that there is")
        for name in options.modules:
            if not (Path(folder) / f"{name}.py").exists():
                parser.error(f"{text}: has no {name}.py")
        options.folders[label] = Path(folder)
    if len(options.folders) < max(2, len(options.named)):
        parser.error("at least two folders, each with a label of its own")
    known = {cell.module for cell in CELLS[options.which]}
    for name in options.modules:
        if name not in known:
            parser.error(f"--modules: no cell of the {options.which} pass measures {name}")
    for length in options.lengths:
        if not 1 <= length <= TOKENS:
            parser.error(f"--lengths: {length} is not from 1 to {TOKENS}")
    if options.repeat < 1:
        parser.error("--repeat: at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and shows the table; status 1 where a version fails or is wrong."""
    options = _arguments(arguments)
    if not sees_gpu("versions"):
        return 2
    device, which = torch.device("cuda"), PASSES[options.which]
    torch.set_float32_matmul_precision("high")  # float32 may use the tf32 units
    cells = cells_of(options.which, options.modules, options.lengths)
    with tempfile.TemporaryDirectory() as scratch:
        versions = {
            name: {
                label: load_version(label, folder, name, Path(scratch))
                for label, folder in options.folders.items()
            }
            for name in options.modules
        }
        rows = [
            {
                **new_row(cell, options.folders, versions[cell.module], which),
                "inputs": options.inputs,
            }
            for cell in cells
        ]
        for repetition in range(options.repeat):
            for cell, row in zip(cells, rows, strict=True):
                loaded = versions[cell.module].items()
                peers = {label: version_of(module, which) for label, module in loaded}
                measure(cell, row, peers, repetition, device, TIMERS, which)
                print(f"[{repetition + 1}] {row['cell']:28} {row['tflops']}", flush=True)
    document = {
        "benchmark": "versions",
        "environment": environment(device),
        "protocol": protocol(which),
        "pass": which.name,
        "versions": list(options.folders),
        "cells": rows,
    }
    tell(document, versions_table, options.json)
    return 1 if _refused(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
