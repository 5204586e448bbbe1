"""What the partitions of the Gluon kernels capture: the values that a block hands them.

Triton passes captures through shared memory, packed one after the other, and only what a partition
reads. Of the call's values that is what stands in the kernel's text, which the plan has: conditions
that the kernel does not evaluate, and bounds that it does not print, need nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from flashgen.plan.arguments import KernelArguments

# Bytes of what is passed: numbers, addresses (of tensors and of their descriptors), and views of
# shared memory, which have an address and an offset for each dimension.
NUMBER, ADDRESS = 4, 8
TILES, BARRIERS, NUMBERS, BARRIER = (ADDRESS + NUMBER * rank for rank in (5, 2, 2, 1))
ROWS, MADE, FACTORS = (ADDRESS + NUMBER * rank for rank in (4, 3, 2))


class Read:
    """What the kernel's text reads.

    Attributes:
        names: variables.
        indices: for each tensor, those of every element that is read.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        trees = [ast.parse(text, mode="eval") for text in texts if text]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.indices: dict[str, list[list[ast.expr]]] = {}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_at_"):
                self.indices.setdefault(ast.unparse(node.args[0]), []).append(node.args[1:])

    def only_at_0(self, tensor: str, count: int) -> list[int]:
        """The dimensions of a tensor, of its first `count`, that are read at index 0 alone."""
        return [
            i
            for i in range(count)
            if all(ast.unparse(index[i]) == "0" for index in self.indices.get(tensor, []))
        ]

    def last_index_varies(self, tensor: str) -> bool:
        """Whether its last stride takes part in the address of some element."""
        return any(ast.unparse(index[-1]) != "0" for index in self.indices.get(tensor, []))


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
