"""Reading machine code of NVIDIA GPUs for one kind of miscompilation."""

from __future__ import annotations

import re
import subprocess
import tempfile

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?);\s*/\*")
_UNIFORM = re.compile(r"\bUR(\d+)\b")

# What writes its first operand where that is a uniform register.
_WRITERS = ("U", "R2UR", "S2UR", "VOTEU", "CS2UR", "REDUX")


def unset_uniform_registers(cubin: bytes) -> list[str]:
    """The instructions that read a uniform register which no earlier instruction has set.

    wgmma takes the addresses of its tiles from uniform registers. Code is read from top to bottom,
    loops once: what is set on no way to an instruction is not set above it either.
    """
    is_set: set[int] = set()
    found = []
    for opcode, operands in _INSTRUCTION.findall(_disassembled(cubin)):
        read, written = _registers(opcode, [part.strip() for part in operands.split(",")])
        if not read <= is_set:
            found.append(f"{opcode} {operands}")
        is_set |= written
    return found


def _registers(opcode: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """The numbers of the uniform registers that an instruction reads and writes."""
    read: set[int] = set()
    written: set[int] = set()
    pairs = ".64" in opcode and opcode.startswith("U")
    for place, operand in enumerate(operands):
        for number in map(int, _UNIFORM.findall(operand)):
            if place == 0 and opcode.startswith(_WRITERS) and operand == f"UR{number}":
                written |= {number + i for i in range(2 if pairs or ".WIDE" in opcode else 1)}
            elif "gdesc[" in operand:
                # Four registers, of which the first two describe A unless A is in registers.
                of_a = re.match(r"R\d", operands[1]) is None
                read |= {number + i for i in range(0 if of_a else 2, 4)}
            else:
                read |= {number + i for i in range(2 if pairs or "desc[" in operand else 1)}
    return read, written


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
