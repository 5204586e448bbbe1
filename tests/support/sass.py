"""Reading machine code of NVIDIA GPUs: one kind of miscompilation, and what it consists of."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);(.*))$")
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_LABEL = re.compile(r"\.L_x_\d+")
_UNIFORM = re.compile(r"\bUR(\d+)\b")

# What writes its first operand where that is a uniform register.
_WRITERS = ("U", "R2UR", "S2UR", "VOTEU", "CS2UR", "REDUX")


@dataclass(frozen=True)
class _Instruction:
    """One instruction: its text, the uniform registers of it, and which come after it."""

    text: str
    read: frozenset[int]
    written: frozenset[int]
    next: tuple[int, ...]


def unset_uniform_registers(cubin: bytes) -> list[str]:
    """The instructions that may read a uniform register which nothing has set on the way to them.

    wgmma takes the addresses of its tiles from uniform registers. What is set under a condition
    counts as set: the code that reads it has the same condition.
    """
    code = _instructions(_disassembled(cubin))
    is_set: dict[int, frozenset[int]] = {0: frozenset()}
    pending = [0]
    while pending:
        here = pending.pop()
        after = is_set[here] | code[here].written
        for there in code[here].next:
            known = is_set.get(there)
            if known is None or not known <= after:
                is_set[there] = after if known is None else known & after
                pending.append(there)
    return [code[i].text for i, known in sorted(is_set.items()) if not code[i].read <= known]


def opcodes(cubin: bytes) -> Counter[str]:
    """How many instructions there are of each kind, by their names without what follows a dot."""
    texts = (instruction.text for instruction in _instructions(_disassembled(cubin)))
    return Counter(re.split(r"[.\s]", _PREDICATE.sub("", text, count=1))[0] for text in texts)


def _instructions(listing: str) -> list[_Instruction]:
    """The instructions of a listing by nvdisasm, whose labels tell where branches lead."""
    labels: dict[str, int] = {}
    texts: list[str] = []
    for line in filter(None, map(_LINE.match, listing.splitlines())):
        if line[1]:
            labels[line[1]] = len(texts)
        else:
            texts.append(line[2] + line[3])
    return [_instruction(place, text, labels, len(texts)) for place, text in enumerate(texts)]


def _instruction(place: int, text: str, labels: dict[str, int], end: int) -> _Instruction:
    predicate = _PREDICATE.match(text)
    opcode, *rest = _PREDICATE.sub("", text, count=1).split(maxsplit=1)
    operands = [part.strip() for part in "".join(rest).split(",")]
    following = [place + 1]
    if opcode.startswith(("BRA", "BRX", "EXIT")):
        always = predicate is None and re.match(r"!?U?P\d", operands[0]) is None
        following = [labels[name] for name in _LABEL.findall(text)] + [place + 1] * (not always)
    read, written = _registers(opcode, operands)
    return _Instruction(text, read, written, tuple(i for i in following if i < end))


def _registers(opcode: str, operands: Sequence[str]) -> tuple[frozenset[int], frozenset[int]]:
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
    return frozenset(read), frozenset(written)


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
