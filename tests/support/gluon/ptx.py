"""PTX of several instructions, run one after the other on the elements of tensors."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import torch

_KINDS = {
    "b32": torch.int32, "s32": torch.int32, "u32": torch.int32, "f32": torch.float32,
    "pred": torch.bool,
}  # fmt: skip
_RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")


def run(text: str, args: Sequence[torch.Tensor], result: torch.dtype) -> torch.Tensor:
    """What a block, in braces, leaves in $0; $1 and so on are the arguments, of one shape.

    Raises:
        NotImplementedError: an instruction that is not known here.
    """
    body = re.fullmatch(r"\s*\{(.*)\}\s*", text, re.DOTALL)
    if body is None:
        raise NotImplementedError(text)
    registers = _Registers(torch.broadcast_tensors(*args), result)
    for statement in filter(None, map(str.strip, body[1].split(";"))):
        opcode, operands = statement.split(maxsplit=1)
        registers.execute(opcode, [operand.strip() for operand in operands.split(",")])
    return registers.values["$0"]


class _Registers:
    """What registers are of, and what they hold."""

    def __init__(self, args: Sequence[torch.Tensor], result: torch.dtype) -> None:
        self.kinds = {"$0": result, **{f"${i}": x.dtype for i, x in enumerate(args, 1)}}
        self.values = {f"${i}": x for i, x in enumerate(args, 1)}

    def execute(self, opcode: str, operands: Sequence[str]) -> None:
        """One instruction, or the declaration of registers."""
        name, *suffixes = opcode.split(".")
        if opcode == ".reg":
            of, first = operands[0].split()
            self.kinds |= dict.fromkeys((first, *operands[1:]), _KINDS[of.removeprefix(".")])
            return
        if suffixes[-1] not in _KINDS:
            raise NotImplementedError(opcode)
        kind = _KINDS[suffixes[-1]]
        to, *sources = operands
        if name == "and":
            a, b = (self._read(source, kind) for source in sources)
            self._write(to, a & b)
        elif name == "setp" and suffixes[0] in _RELATIONS:
            a, b = (self._read(source, kind) for source in sources)
            if suffixes[-1] == "u32":  # their order is that of numbers from -2^31 on
                a, b = a ^ -(2**31), b ^ -(2**31)
            self._write(to, getattr(torch, suffixes[0])(a, b))
        elif name == "neg":
            self._write(to, -self._read(sources[0], kind))
        elif name == "selp":
            a, b = (self._read(source, kind) for source in sources[:2])
            self._write(to, torch.where(self._read(sources[2], torch.bool), a, b))
        else:
            raise NotImplementedError(opcode)

    def _read(self, source: str, kind: torch.dtype) -> torch.Tensor:
        if source in self.kinds:
            assert self.kinds[source] == kind, f"{source} is of {self.kinds[source]}, not {kind}"
            return self.values[source]
        if bits := re.fullmatch("0[fF]([0-9A-Fa-f]{8})", source):
            (number,) = struct.unpack(">f", bytes.fromhex(bits[1]))
        else:
            number = int(source)
        return torch.tensor(number, dtype=kind)

    def _write(self, to: str, value: torch.Tensor) -> None:
        assert self.kinds[to] == value.dtype, f"{to} is of {self.kinds[to]}, not {value.dtype}"
        self.values[to] = value
