"""What the partitions of the Gluon kernel capture: the values that a block hands them.

Triton passes captures through shared memory, packed one after the other, and only what a partition
reads. Of the call's values that is what stands in the kernel's text, which the plan has: conditions
that the kernel does not evaluate, and bounds that it does not print, need nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from flashgen.plan import KernelPlan
from flashgen.plan.cuts import cut_table

# Bytes of what is passed: numbers, addresses (of tensors and of their descriptors), and views of
# shared memory, which have an address and an offset for each dimension.
NUMBER, ADDRESS = 4, 8
TILES, BARRIERS, NUMBERS, BARRIER = (ADDRESS + NUMBER * rank for rank in (5, 2, 2, 1))

# Arrays of barriers: full and empty, of queries, keys, values and what is handed over.
BARRIER_ARRAYS = 8

# Whatever the mask: num_q_heads, num_kv_heads, q_len, num_tiles_m, num_tiles, lse_rows.
NUMBERS_OF_A_CALL = 6


def captured_bytes(plan: KernelPlan, *, contiguous: bool = True, ones: bool = False) -> int:
    """Bytes of all that the partitions capture.

    Args:
        plan: the kernel.
        contiguous: tensors that are parameters are so along their last dimension, as they usually
            are: the compiler then knows that stride.
        ones: it captures such a stride all the same, those of all tensors as one number, as
            Triton 3.6 does and 3.7 does not.
    """
    read = _Read(plan)
    parts = 2 * (len(plan.qk_parts) + len(plan.v_parts))
    size = parts * (ADDRESS + TILES) + ADDRESS  # descriptors and tiles of q, k, v, out; lse
    size += BARRIER_ARRAYS * BARRIERS + NUMBERS + NUMBERS_OF_A_CALL * NUMBER
    if plan.normaliser == "softmax":  # votes, outgrown, checked
        size += 2 * NUMBERS + BARRIER
    if plan.tiles.uneven:  # the counter, heads_together
        size += ADDRESS + NUMBER
    if plan.listing:
        size += ADDRESS
    if cut_table(plan):  # the list of tiles, the output
        size += 2 * ADDRESS
    scale = "scale" if plan.reads_scale else "qk_scale"
    numbers = {"kv_len", scale, *plan.kernel_arguments.scalars}
    size += NUMBER * len(numbers & read.names)
    tensors = plan.kernel_arguments.tensors
    for tensor in tensors:
        if tensor.name in read.names:
            strides = tensor.ndim - 1 - len(read.only_at_0(tensor.name, tensor.ndim - 1))
            size += ADDRESS + NUMBER * (tensor.ndim + strides + (not contiguous))
    if ones and contiguous and any(read.last_index_varies(x.name) for x in tensors):
        size += NUMBER
    return size


class _Read:
    """What the kernel's text reads.

    Attributes:
        names: variables.
        indices: for each tensor, those of every element that is read.
    """

    def __init__(self, plan: KernelPlan) -> None:
        self._plan = plan
        self.indices: dict[str, list[list[ast.expr]]] = {}
        for node in self._nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_at_"):
                self.indices.setdefault(ast.unparse(node.args[0]), []).append(node.args[1:])

    @cached_property
    def names(self) -> set[str]:
        names = {node.id for node in self._nodes if isinstance(node, ast.Name)}
        if self._plan.checks_kv_len or self._plan.listing:
            names.add("kv_len")
        if not self._plan.reads_scale:
            names.add("qk_scale")
        return names

    def only_at_0(self, tensor: str, count: int) -> list[int]:
        """Of its first dimensions, those that are read at index 0 alone, whatever their stride."""
        return [
            i
            for i in range(count)
            if all(ast.unparse(index[i]) == "0" for index in self.indices.get(tensor, []))
        ]

    def last_index_varies(self, tensor: str) -> bool:
        """Whether its last stride takes part in the address of some element."""
        return any(ast.unparse(index[-1]) != "0" for index in self.indices.get(tensor, []))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        texts = filter(None, (*_bounds(self._plan), *_expressions(self._plan)))
        return [node for text in texts for node in ast.walk(ast.parse(text, mode="eval"))]


def _bounds(plan: KernelPlan) -> Iterator[str]:
    """Text of which tiles of keys are visited, and which need the mask."""
    tiles = plan.tiles
    if tiles.listed:
        return
    masks = bool(plan.code.conditions or plan.checks_kv_len)
    for run in tiles.runs:
        yield from (run.end, run.condition)
        if not tiles.from_key_0:
            yield run.begin
        if masks:
            yield from (run.full_end, "" if tiles.from_key_0 else run.full_begin)


def _expressions(plan: KernelPlan) -> Iterator[str]:
    """Text of scores, mask and sink."""
    code = plan.code
    for a in (*code.scalars, *code.rows, *code.columns, *code.elements, *code.masked):
        yield a.code
    yield from (code.score, code.shift, code.sink, *code.conditions)
    for table in code.tables:
        yield from (table.entry, table.row, table.column, table.first_row, table.first_column)
