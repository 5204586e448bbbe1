"""The values that the partitions of a Gluon kernel capture: a block passes them to its warps.

Triton passes captures through shared memory, packed one after the other, and only those that a
partition reads. The plan knows which of the call's values the kernel's code reads: conditions that
the kernel does not evaluate, and bounds that it does not compute, need no captures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashgen.plan.arguments import KernelArguments
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbols import Load

# Bytes of what is passed: numbers, addresses (of tensors and of their descriptors), and views of
# shared memory, which have an address and an offset for each dimension.
NUMBER, ADDRESS = 4, 8
TILES, BARRIERS, NUMBERS, BARRIER = (ADDRESS + NUMBER * rank for rank in (5, 2, 2, 1))
ROWS, MADE, FACTORS = (ADDRESS + NUMBER * rank for rank in (4, 3, 2))


class Read:
    """The names and elements that the kernel's code reads.

    Attributes:
        names: variables.
        indices: for each tensor, the indices of every element that is read.
    """

    def __init__(self, codes: Iterable[Code | None], names: Iterable[str] = ()) -> None:
        """The reads of code, with further names that the kernel reads."""
        read = [code for code in codes if code is not None]
        self.names = read_by(read).union(names)
        self.indices: dict[str, list[tuple[Any, ...]]] = {}
        for load in (load for code in read for load in code.expr.atoms(Load)):
            tensor, *indices = load.args
            self.indices.setdefault(tensor.name, []).append(tuple(indices))

    def only_at_0(self, tensor: str, count: int) -> list[int]:
        """The dimensions of a tensor, of its first `count`, that are read at index 0 alone."""
        return [
            i
            for i in range(count)
            if all(indices[i] == 0 for indices in self.indices.get(tensor, []))
        ]

    def last_index_varies(self, tensor: str) -> bool:
        """Whether its last stride takes part in the address of some element."""
        return any(indices[-1] != 0 for indices in self.indices.get(tensor, []))


def captured_parameters(
    read: Read, arguments: KernelArguments, *, contiguous: bool, ones: bool
) -> int:
    """Bytes of numbers and tensors that are parameters."""
    size = NUMBER * len(read.names.intersection(arguments.scalars))
    for tensor in arguments.tensors:
        if tensor.name in read.names:
            strides = tensor.ndim - 1 - len(read.only_at_0(tensor.name, tensor.ndim - 1))
            size += ADDRESS + NUMBER * (tensor.ndim + strides + (not contiguous))
    if ones and contiguous and any(read.last_index_varies(x.name) for x in arguments.tensors):
        size += NUMBER
    return size
