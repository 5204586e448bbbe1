"""HandedColumns: what the producer loads of a masked visit's keys, for all consumers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.plan.arguments import KernelTensor
from flashgen.symbolic.hoisting import Assignment, needed_for
from flashgen.symbols import Load

#: Gluon's types in shared memory of elements that may be handed over. Elements of 16 bits are
#: compared as such where a mask reads them, so they stay where they are.
TYPES: Mapping[str, str] = MappingProxyType(
    {"int32": "int32", "bool": "int8", "float32": "float32"}
)

_BYTES = {"int32": 4, "int8": 1, "float32": 4}


@dataclass(frozen=True)
class HandedColumn:
    """An element of each key of a tile.

    Attributes:
        name: the variable that holds it.
        dtype: Gluon's type of it in shared memory.
    """

    name: str
    dtype: str

    @property
    def tiles(self) -> str:
        """The name of its buffers, one for each stage of keys."""
        return f"{self.name}_tiles"

    @property
    def itemsize(self) -> int:
        """Bytes of a key's element."""
        return _BYTES[self.dtype]


@dataclass(frozen=True)
class HandedColumns:
    """The lines that only a mask's conditions read, by who computes them.

    Attributes:
        columns: what is handed over; nothing where a kernel has no lists.
        lines: what the producer computes for it.
        others: what consumers compute themselves; without `columns`, all of these lines.
    """

    columns: tuple[HandedColumn, ...]
    lines: tuple[Assignment, ...]
    others: tuple[Assignment, ...]


def handed_columns(
    masked: Iterable[Assignment],
    read: Iterable[str],
    known: Collection[str],
    tensors: Iterable[KernelTensor],
) -> HandedColumns:
    """The elements of tensors among these lines are handed over, if the producer knows their place.

    Args:
        masked: lines that compute something of the keys of a tile, in order.
        read: the variables that consumers read.
        known: those that the producer has.
        tensors: the tensors of the kernel.
    """
    types = {tensor.name: TYPES.get(tensor.dtype) for tensor in tensors}
    of_producer = set(known)
    computed: list[Assignment] = []
    for line in masked:
        if line.code.names <= of_producer:
            of_producer.add(line.name)
            computed.append(line)
    of_consumers = set(read)
    columns: list[HandedColumn] = []
    others: list[Assignment] = []
    for line in reversed([*masked]):
        if line.name not in of_consumers:
            continue
        expr = line.code.expr
        dtype = types.get(str(expr.args[0])) if isinstance(expr, Load) else None
        if dtype is not None and line in computed:
            columns.insert(0, HandedColumn(line.name, dtype))
        else:
            others.insert(0, line)
            of_consumers |= line.code.names
    lines = needed_for(computed, (column.name for column in columns))
    return HandedColumns(tuple(columns), lines, tuple(others))
