"""The time of a Gluon forward kernel by statement: what one program waits for, by its SM's clock.

    python -m benchmarks.timeline window_d128 [--length 16384] [--program 66] [--json FILE]

A copy of the shipped module gets marks (`benchmarks.marks`) behind each statement that waits or
takes long. For every pair of marks that a role passes in succession, the table has the number of
times, the mean of cycles between them, and their share of the program's cycles. Marks take time
themselves: the times of a call with and without marks show how much.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import FORWARD, VARIANTS, Cell
from benchmarks.figures import Document, machine
from benchmarks.inputs import make_inputs
from benchmarks.markdown import header, line
from benchmarks.marks import NEVER, intervals, marked, memory_for, passages, statements_of
from benchmarks.peers import Call, load_copy, load_module
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timing import mean_ms

#: The default program: in the middle of an H200's 132.
PROGRAM = 66

#: Calls of each kind before those that are timed, and before the one that is looked at.
WARM_CALLS = 200

#: Rows with less than this share of the program's time are left out of the table.
LEAST_SHARE = 0.002

CELLS = {(cell.module, cell.seq_len): cell for cell in (*FORWARD, *VARIANTS)}


def timeline(cell: Cell, program: int, device: torch.device) -> dict[str, Any]:
    """The marks that the program's roles passed in one call, and the time of a call.

    Raises:
        ValueError: the module has no Gluon forward kernel, or the call no such program.
    """
    shipped = load_module(cell.module)
    text = Path(str(shipped.__file__)).read_text()
    if not (statements := statements_of(text)):
        raise ValueError(f"{cell.module} has no Gluon forward kernel")
    marks = memory_for(len(statements), device)
    attention = ATTENTIONS[cell.attention](cell.seq_len, device)
    inputs = make_inputs(cell, device)

    def call_of(module: Any) -> Call:
        return lambda: module.attention(*inputs, **attention.parameters)

    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        changed = marked(text, marks.data_ptr(), program)
        call = call_of(load_copy("marked", changed, cell.module, Path(scratch)))
        ms = {"shipped": warm_ms(call_of(shipped)), "marked": warm_ms(call)}
        marks.fill_(NEVER)
        call()
    passed = passages(marks.cpu())
    if not any(passed):
        raise ValueError(f"{cell.name}: program {program} passed nothing; are there so many?")
    return {
        "cell": cell.name,
        "program": program,
        "call_ms": ms,
        "cycles": max(cycle for of_role in passed for _, cycle in of_role),
        "statements": statements,
        "intervals": [asdict(interval) for interval in intervals(passed)],
    }


def warm_ms(call: Call) -> float:
    """Milliseconds of a call after equal ones."""
    mean_ms(call, WARM_CALLS)
    return mean_ms(call, WARM_CALLS)


def timeline_table(document: Document) -> str:
    """The cycles of each role by interval."""
    found = document["timeline"]
    ms = found["call_ms"]
    said = (
        f"Program {found['program']} of {found['cell']}: {found['cycles']:,} cycles. A call takes"
        f" {ms['shipped']:.4f} ms, with marks {ms['marked']:.4f}. {machine(document)}."
    )
    rows = header(["role", "from", "to", "times", "cycles", "share"], left=3)
    for row in found["intervals"]:
        share = row["cycles"] / found["cycles"]
        if share >= LEAST_SHARE:
            begin, end = (f"`{found['statements'][row[name]]}`" for name in ("begin", "end"))
            mean = row["cycles"] / row["times"]
            numbers = [f"{row['times']:,}", f"{mean:,.0f}", f"{share:.1%}"]
            rows.append(line([str(row["role"]), begin, end, *numbers]))
    return "\n\n".join([said, "\n".join(rows)])


def cell_asked(parser: ArgumentParser, arguments: Sequence[str] | None) -> tuple[Cell, Namespace]:
    """The forward cell that a command line names by its module and a length, and all options."""
    parser.add_argument("module", metavar="NAME", help="of a cell's module")
    parser.add_argument("--length", type=int, default=16384, metavar="S")
    options = parser.parse_args(arguments)
    if (cell := CELLS.get((options.module, options.length))) is None:
        parser.error(f"no cell has {options.module} at {options.length}")
    return cell, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one call, and shows the table."""
    parser = make_parser("timeline", __doc__)
    parser.add_argument("--program", type=int, default=PROGRAM, metavar="N")
    cell, options = cell_asked(parser, arguments)
    if not sees_gpu("timeline"):
        return 2
    device = torch.device("cuda")
    try:
        found = timeline(cell, options.program, device)
    except ValueError as error:
        print(f"benchmarks.timeline: {error}", file=sys.stderr)
        return 1
    document = {"benchmark": "timeline", "environment": environment(device), "timeline": found}
    tell(document, timeline_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
