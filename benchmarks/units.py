"""Elements that an SM processes in a cycle, for a softmax's instructions, alone and combined.

    python -m benchmarks.units [--json FILE]

Eight warps of each SM repeat a few instructions on 32 independent elements a thread, and read the
clock of their SM before and after. The table also has the cycles for a tile of 64 x 64, whose
products at head_dim 128, with queries and keys and with values, take 512 cycles; and, on Hopper,
the cycles of both while the matrix units are busy (`benchmarks.beside`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.beside import FUSED, beside
from benchmarks.figures import Document, machine
from benchmarks.markdown import header, line
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell

WARPS, ELEMENTS = 8, 32
ROUNDS, REPEATS = 500, 5

#: The repeated sequences: they compute $0 and $1 from $2 and $3; t and u are registers.
SEQUENCES = {
    "exp2": "ex2.approx.ftz.f32 $0, $2; ex2.approx.ftz.f32 $1, $3;",
    "tanh": "tanh.approx.f32 $0, $2; tanh.approx.f32 $1, $3;",
    "tanh, exp2": (
        "tanh.approx.f32 t, $2; tanh.approx.f32 u, $3;"
        " ex2.approx.ftz.f32 $0, t; ex2.approx.ftz.f32 $1, u;"
    ),
    "pack two": "cvt.rn.bf16x2.f32 $0, $3, $2; mov.f32 $1, $2;",
    "exp2, pack two": (
        "ex2.approx.ftz.f32 t, $2; ex2.approx.ftz.f32 u, $3;"
        " cvt.rn.bf16x2.f32 $0, u, t; mov.f32 $1, u;"
    ),
    "softmax": (
        "fma.rn.f32 t, $2, 0f3F000000, 0fBF800000; fma.rn.f32 u, $3, 0f3F000000, 0fBF800000;"
        " ex2.approx.ftz.f32 t, t; ex2.approx.ftz.f32 u, u;"
        " cvt.rn.bf16x2.f32 $0, u, t; add.f32 $1, t, u;"
    ),
    "softcap and softmax": (
        "mul.f32 t, $2, 0f3F000000; mul.f32 u, $3, 0f3F000000;"
        " tanh.approx.f32 t, t; tanh.approx.f32 u, u;"
        " fma.rn.f32 t, t, 0f40000000, 0fBF800000; fma.rn.f32 u, u, 0f40000000, 0fBF800000;"
        " ex2.approx.ftz.f32 t, t; ex2.approx.ftz.f32 u, u;"
        " cvt.rn.bf16x2.f32 $0, u, t; add.f32 $1, t, u;"
    ),
}


@triton.jit
def _clock(x):
    """The clock of the SM once x has been computed, and x once the clock has been read."""
    return tl.inline_asm_elementwise(
        "mov.b32 $1, $2; mov.u32 $0, %clock;", "=r,=f,f", [x],
        dtype=(tl.int32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _repeat(values, cycles, ROUNDS: tl.constexpr, SIZE: tl.constexpr, SEQUENCE: tl.constexpr):
    """Runs rounds of a sequence on a program's elements, and stores the cycles of each."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    begun, x = _clock(tl.load(values + at))
    for _ in range(ROUNDS):
        x = tl.inline_asm_elementwise(
            SEQUENCE, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=False, pack=2
        )
    ended, x = _clock(x)
    tl.store(values + at, x)
    tl.store(cycles + at, ended - begun)


def asm(sequence: str) -> str:
    """A sequence with its registers declared."""
    return f"{{.reg .f32 t, u; {sequence}}}"


def elements_a_cycle(name: str, device: torch.device) -> float:
    """Elements a cycle of the SM with the median number of cycles."""
    size = 32 * WARPS * ELEMENTS
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    values = torch.randn(programs * size, device=device)
    cycles = torch.empty(programs * size, dtype=torch.int32, device=device)
    for _ in range(REPEATS):  # only the last run counts: the first ones load the code
        sequence = asm(SEQUENCES[name])
        _repeat[programs,](values, cycles, ROUNDS, size, sequence, num_warps=WARPS, **FUSED)
    taken = cycles.view(programs, size).amax(1).tolist()
    return ROUNDS * size / float(median(taken))


def units_table(document: Document) -> str:
    """The rate of each sequence."""
    lines = header(["of an element", "elements a cycle", "cycles for 64 x 64"])
    for name, rate in document["rates"].items():
        lines.append(line([name, f"{rate:.2f}", f"{64 * 64 / rate:,.0f}"]))
    tables = [f"What an SM takes; {machine(document)}.", "\n".join(lines)]
    if found := document["beside"]:
        names = ["alone", "beside products", "products meanwhile"]
        lines = header(["cycles for 64 x 64", *names])
        for name, cycles in found.items():
            lines.append(line([name, *(f"{x:,.0f}" for x in cycles.values())]))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each sequence, and shows the table."""
    options = make_parser("units", __doc__).parse_args(arguments)
    if not sees_gpu("units"):
        return 2
    device = torch.device("cuda")
    document: dict[str, Any] = {
        "benchmark": "units",
        "environment": environment(device),
        "rates": {name: round(elements_a_cycle(name, device), 3) for name in SEQUENCES},
        "beside": {},
    }
    if torch.cuda.get_device_capability(device) == (9, 0):
        document["beside"] = {
            name: asdict(beside(asm(sequence), device)) for name, sequence in SEQUENCES.items()
        }
    tell(document, units_table, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
