"""When the programs of a Gluon forward kernel begin, have their first scores, and end.

    python -m benchmarks.programs documents_d128 [--length 16384] [--json FILE]

A program that ends before the others is idle until the call ends: the last line has the mean share
of a call. The global timer compares programs; the clock rate of their SMs, which is lower than the
rate that a driver reports, is their cycles over its time.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import Cell
from benchmarks.figures import Document, machine
from benchmarks.inputs import make_inputs
from benchmarks.markdown import header, line
from benchmarks.peers import load_copy, load_module
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell
from benchmarks.timeline import cell_asked, warm_ms

#: The moments that a consumer notes.
MOMENTS = ("begin", "first scores", "end")

#: The most consumers of a program.
MOST_CONSUMERS = 3

_NOTE = '''\
NOTES: gl.constexpr = gl.constexpr({address})


@gluon.jit
def _note(MOMENT: gl.constexpr, CONSUMER: gl.constexpr):
    """Notes the global timer, in ns, and the clock of the SM."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = (gl.program_id(0) * {consumers} + CONSUMER) * {moments} + MOMENT
    number = gl.full([1], number, gl.int64, LANES)
    now, cycle = gl.inline_asm_elementwise(
        "mov.u32 $0, %globaltimer_lo; mov.u32 $1, %clock;", "=r,=r,l", [number],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    ptr = (NOTES + 8 * number).to(gl.pointer_type(gl.int32))
    gl.store(ptr, now)
    gl.store(ptr + 1, cycle)


'''


def noted(text: str, address: int) -> str:
    """A module whose consumers note when they begin, have asked for their first scores, and end.

    Args:
        text: its source.
        address: where `memory_for` lies.

    Raises:
        ValueError: it has no Gluon forward kernel.
    """
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    consumer = next((f for f in functions if f.name == "_consumer"), None)
    if consumer is None:
        raise ValueError("no Gluon forward kernel")
    waits = (s for s in ast.walk(consumer) if isinstance(s, ast.Assign))
    first = min(s.lineno for s in waits if "warpgroup_mma_wait(" in ast.unparse(s))
    begin = next(s for s in consumer.body if ast.unparse(s).startswith("q_count = "))
    lines = text.splitlines()
    assert consumer.end_lineno is not None
    # Behind the last line, before the wait for the first tile's scores, before the first count.
    lines.insert(consumer.end_lineno, "    _note(2, NUMBER)")
    indent = lines[first - 1][: -len(lines[first - 1].lstrip())]
    lines[first - 1 : first - 1] = [
        f"{indent}if q_count == 0:",
        f"{indent}    _note(1, NUMBER)",
    ]
    lines.insert(begin.lineno - 1, "    _note(0, NUMBER)")
    before = consumer.decorator_list[0].lineno - 1
    note = _NOTE.format(address=address, consumers=MOST_CONSUMERS, moments=len(MOMENTS))
    return "\n".join([*lines[:before], *note.splitlines(), *lines[before:], ""])


def memory_for(programs: int, device: torch.device) -> torch.Tensor:
    """A buffer for the notes, (program, consumer, moment, timer and clock); 0: not noted."""
    shape = (programs, MOST_CONSUMERS, len(MOMENTS), 2)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def summary(notes: torch.Tensor) -> dict[str, Any]:
    """Microseconds since the first program began, and the idle share of the call.

    A program begins and has its first scores when its first consumer does, and ends when its last
    one does. Both counters have 32 bits, and a call takes less than half of their range.
    """
    notes = notes[(notes[:, 0, 0, 0] != 0)]
    notes = notes[:, (notes[0, :, 0, 0] != 0)]
    since = notes[..., 0] - notes[0, 0, 0, 0]  # 32 bits wrap like the timer
    us = (since - since[..., 0].min()).double() / 1e3
    moments = (us[..., 0].amin(1), us[..., 1].amin(1), us[..., 2].amax(1))
    cycles = (notes[..., 2, 1] - notes[..., 0, 1]).double()
    clocks = cycles / (us[..., 2] - us[..., 0])
    end = moments[-1]
    return {
        "programs": len(notes),
        "us": {
            name: [float(x) for x in (at.min(), at.median(), at.mean(), at.max())]
            for name, at in zip(MOMENTS, moments, strict=True)
        },
        "mhz": float(clocks.median()),
        "idle": float(1 - end.mean() / end.max()),
    }


def programs(cell: Cell, device: torch.device) -> dict[str, Any]:
    """`summary` of one call after many equal ones, and a call's time with and without notes."""
    shipped = load_module(cell.module)
    text = Path(str(shipped.__file__)).read_text()
    notes = memory_for(torch.cuda.get_device_properties(device).multi_processor_count, device)
    attention = ATTENTIONS[cell.attention](cell.seq_len, device)
    inputs = make_inputs(cell, device)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        copy = load_copy("noted", noted(text, notes.data_ptr()), cell.module, Path(scratch))
        # The module with notes comes last, so the notes are from its last call.
        ms = {
            name: warm_ms(lambda module=module: module.attention(*inputs, **attention.parameters))
            for name, module in (("shipped", shipped), ("noted", copy))
        }
    return {"cell": cell.name, "call_ms": ms, **summary(notes.cpu())}


def programs_table(document: Document) -> str:
    """The table of when programs began and ended."""
    found = document["programs"]
    ms = found["call_ms"]
    said = (
        f"{found['programs']} programs of {found['cell']}, in µs since the first began. A call"
        f" takes {ms['shipped']:.4f} ms, with notes {ms['noted']:.4f}. {machine(document)}."
    )
    rows = header(["moment", "first", "median", "mean", "last"], left=1)
    for name, us in found["us"].items():
        rows.append(line([name, *(f"{x:.1f}" for x in us)]))
    last = f"Idle at the end: {found['idle']:.1%}. The clock: {found['mhz']:,.0f} MHz."
    return "\n\n".join([said, "\n".join(rows), last])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one call, and shows the table."""
    cell, options = cell_asked(make_parser("programs", __doc__), arguments)
    if not sees_gpu("programs"):
        return 2
    device = torch.device("cuda")
    try:
        found = programs(cell, device)
    except ValueError as error:
        print(f"benchmarks.programs: {options.module}: {error}", file=sys.stderr)
        return 1
    document = {"benchmark": "programs", "environment": environment(device), "programs": found}
    tell(document, programs_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
