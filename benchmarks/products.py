"""The speed of a Gluon forward kernel with only its products, or only its loads.

    python -m benchmarks.products causal_d128 window_d128 [--length 16384] [--json FILE]

Beside each module two copies are timed that visit the same tiles of keys. One makes the same
products, without masks, score functions, exponentials and sums: values are multiplied by the
products of queries and keys themselves, 0 where they are negative. The other loads the same and
multiplies nothing. The output of neither is attention. The lower of both rates bounds a kernel
with these tiles on this chip, under its power limit. With ``--power`` the power of each is
measured, too, and with it the energy of a visible FLOP.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.attentions import ATTENTIONS, visible_pairs
from benchmarks.cells import Cell
from benchmarks.figures import OWN, TIMINGS, Document, Row, machine, rates, timings
from benchmarks.inputs import make_inputs
from benchmarks.markdown import header, line
from benchmarks.measuring import add_time
from benchmarks.passes import FORWARD_PASS
from benchmarks.peers import load_copy, load_module
from benchmarks.power import watts
from benchmarks.record import environment, protocol
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timeline import CELLS
from benchmarks.timing import TIMERS

#: The copies, by the names of their figures.
COPIES = PRODUCTS, LOADS = "products", "loads"

#: Beginnings of the statements that a step keeps, besides those that unpack.
_KEPT = (
    "v_stage, v_phase =",
    "k_stage, _ =",
    "stage, _ =",
    "next_stage, next_phase =",
    "_ping_pong_wait(",
    "_ping_pong_arrive(",
    "scores = _start_scores(",
    "scores = warpgroup_mma_wait(",
    "acc",  # of each part of the values
    "weights = ",
    "mbarrier.",
)

_FIRST = """\
    lanes = _lane_sum(scores)
    return _row_sum(lanes, ROWS), lanes, (_pack(scores),), online_max
"""

_NO_SCORES = """\
    COLUMNS: gl.constexpr = SCORES.instr_shape[1]
    return gl.zeros([64, COLUMNS], gl.float32, SCORES)
"""


def alone(text: str, what: str) -> str:
    """A module whose Gluon forward kernel does little except its products, or its loads.

    Args:
        text: the source of the whole module.
        what: one of `COPIES`.

    Raises:
        ValueError: it has no such kernel, or one whose scores come in halves or have no maximum.
    """
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    if "_first_weights" not in functions:
        raise ValueError("no Gluon forward kernel")
    first, step, consumer = (functions[f] for f in ("_first_weights", "_step", "_consumer"))
    if "online_max" not in _arguments(first) or "scores_1" in _arguments(first):
        raise ValueError("a kernel of another kind")
    lines = text.splitlines(keepends=True)
    edits = [(_body(first), _FIRST), (_body(step), _step(step))]
    edits += [edit for asks in (functions["_last_sums"], consumer) for edit in _votes(asks)]
    if what == LOADS:
        edits += [
            (_body(function), _NO_SCORES if name == "_start_scores" else "    return acc\n")
            for name, function in functions.items()
            if name == "_start_scores" or name.startswith(("_start_values", "_add_values"))
        ]
    for (begin, end), new in sorted(edits, reverse=True):
        lines[begin:end] = [new]
    return re.sub(r"cvt\.rn\.(b?f16x2)", r"cvt.rn.relu.\1", "".join(lines))


def _arguments(function: ast.FunctionDef) -> list[str]:
    return [x.arg for x in function.args.args]


def _body(function: ast.FunctionDef) -> tuple[int, int]:
    """The lines of a function behind its docstring."""
    assert function.end_lineno is not None and function.body[0].end_lineno is not None
    return function.body[0].end_lineno, function.end_lineno


def _step(step: ast.FunctionDef) -> str:
    kept = []
    for statement in step.body[1:]:
        said = ast.unparse(statement)
        unpacks = isinstance(statement, ast.Assign) and isinstance(
            statement.value, ast.Name | ast.Attribute
        )
        if unpacks or isinstance(statement, ast.AnnAssign) or said.startswith(_KEPT):
            kept.append(said.replace("_pack(p)", "_pack(scores)"))
    results = ", ".join(x for x in _arguments(step) if x.startswith("acc"))
    results += ", m_i, l_i, weights"
    kept += ["if GROWS:", f"    return {results}, growing", "else:", f"    return {results}"]
    return "".join(f"    {said}\n" for said in kept)


def _votes(function: ast.FunctionDef) -> Iterable[tuple[tuple[int, int], str]]:
    """Replacements of votes: no tile is repeated, and no step looks for maxima."""
    for node in ast.walk(function):
        said = ast.unparse(node) if isinstance(node, ast.Assign) else ""
        if said.startswith(("redone = _any(", "growing = _any(")):
            assert node.end_lineno is not None
            never = " " * node.col_offset + said.split("=")[0] + "= online_max * 0\n"
            yield (node.lineno - 1, node.end_lineno), never
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("_any("):
            assert node.test.end_lineno is not None
            never = " " * node.col_offset + "if online_max < 0:\n"
            yield (node.lineno - 1, node.test.end_lineno), never


def measured(cell: Cell, scratch: Path, repeat: int, power: bool = False) -> dict[str, Any]:
    """TFLOP/s on visible elements of a cell's module and of its copies, by each timing.

    With `power`, also the watts of each under sustained load.
    """
    device = torch.device("cuda")
    shipped = load_module(cell.module)
    text = Path(str(shipped.__file__)).read_text()
    copies = {what: load_copy(what, alone(text, what), cell.module, scratch) for what in COPIES}
    versions = {OWN: shipped, **copies}
    attention = ATTENTIONS[cell.attention](cell.seq_len, device)
    inputs = make_inputs(cell, device)
    flops = cell.flops(visible_pairs(attention, cell.seq_len, device))
    row: dict[str, Any] = {"cell": cell.name, "module": cell.module}
    calls = {
        name: partial(version.attention, *inputs, **attention.parameters)
        for name, version in versions.items()
    }
    with torch.no_grad():
        for repetition in range(repeat):
            order = list(calls)[:: -1 if repetition % 2 else 1]
            for key, time_ms in TIMERS.items():
                for name in order:
                    add_time(row, key, name, time_ms(calls[name]), flops)
            for name in order if power else ():
                row.setdefault("watts", {}).setdefault(name, []).append(round(watts(calls[name])))
    return row


def products_table(document: Document) -> str:
    """All rates of each cell, by each timing."""
    rows = document["cells"]
    copies = [what for what in COPIES if any(what in row["ms"] for row in rows)]
    said = f"TFLOP/s on visible elements, the repetitions one after the other. {machine(document)}."
    parts = [said]
    for timing in timings(rows):
        lines = header(["cell", "kernel", *(f"{what} alone" for what in copies), *copies])
        for row in rows:
            found = {name: rates(row, name, timing) for name in (OWN, *copies)}
            shown = (" ".join(f"{x:.0f}" for x in twice) for twice in found.values())
            shares = (f"{mean(found[OWN]) / mean(found[what]):.2f}" for what in copies)
            lines.append(line([row["cell"], *shown, *shares]))
        parts += [f"By {TIMINGS[timing]}; the last columns: the kernel to each.", "\n".join(lines)]
    if any("watts" in row for row in rows):
        lines = header(["cell", "kernel", *(f"{what} alone" for what in copies)])
        lines += [line([row["cell"], *(_energy(row, x) for x in (OWN, *copies))]) for row in rows]
        parts += ["W under load that lasts, and pJ for a visible FLOP.", "\n".join(lines)]
    return "\n\n".join(parts)


def _energy(row: Row, name: str) -> str:
    """As ``"690 690 W, 0.95 pJ"``."""
    drawn = row.get("watts", {}).get(name)
    if not drawn:
        return "-"
    joules = mean(drawn) / mean(rates(row, name, "sustained_ms"))
    return f"{' '.join(map(str, drawn))} W, {joules:.3f} pJ"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each cell, and shows the table."""
    parser = make_parser("products", __doc__)
    parser.add_argument("modules", nargs="+", metavar="NAME", help="of a cell's module")
    parser.add_argument("--length", type=int, default=16384, metavar="S")
    parser.add_argument("--repeat", type=int, default=2, help="times to measure; 2 unless given")
    parser.add_argument("--power", action="store_true", help="watts too; needs nvidia-ml-py")
    options = parser.parse_args(arguments)
    for name in options.modules:
        if (name, options.length) not in CELLS:
            parser.error(f"no cell has {name} at {options.length}")
    if not sees_gpu("products"):
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.modules:
            try:
                cell = CELLS[name, options.length]
                rows.append(measured(cell, Path(scratch), options.repeat, options.power))
            except ValueError as error:
                print(f"benchmarks.products: {name}: {error}", file=sys.stderr)
                return 1
            print(f"{name}: {rows[-1]['tflops']}", flush=True)
    device = torch.device("cuda")
    document = {
        "benchmark": "products",
        "environment": environment(device),
        "protocol": protocol(FORWARD_PASS),
        "cells": rows,
    }
    tell(document, products_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
