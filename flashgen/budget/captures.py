"""What the partitions of the Gluon kernels capture: the values that a block hands them.

Triton passes captures through shared memory, packed one after the other, and only what a partition
reads. Of the call's values that is what stands in the kernel's text, which the plan has: conditions
that the kernel does not evaluate, and bounds that it does not print, need nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from flashgen.plan import KernelPlan
from flashgen.plan.arguments import KernelArguments
from flashgen.plan.cuts import cut_table
from flashgen.plan.hopper import HopperNames
from flashgen.plan.hopper_backward import HopperBackward
from flashgen.plan.hopper_shape import hopper_shape
from flashgen.plan.text import mentioned

# Bytes of what is passed: numbers, addresses (of tensors and of their descriptors), and views of
# shared memory, which have an address and an offset for each dimension.
NUMBER, ADDRESS = 4, 8
TILES, BARRIERS, NUMBERS, BARRIER = (ADDRESS + NUMBER * rank for rank in (5, 2, 2, 1))
ROWS, MADE, FACTORS = (ADDRESS + NUMBER * rank for rank in (4, 3, 2))

# Arrays of barriers: full and empty, of queries, keys, values and what is handed over; keys and
# values may share theirs.
BARRIER_ARRAYS = 8

# Whatever the mask: num_q_heads, num_kv_heads, q_len, num_tiles_m, num_tiles, lse_rows.
NUMBERS_OF_A_CALL = 6

# Of tensors that backward kernels over tiles of keys load: q, k, v, grad_out, rows.
BACKWARD_SOURCES = 5

# Of the one pass: num_q_heads, num_kv_heads, kv_len, rows_len, num_tiles and scale.
NUMBERS_OF_A_BACKWARD_CALL = 6

# Where the pass is divided: num_q_heads, num_kv_heads and scale; batch, kv_head, kv_first, or
# batch, head, q_first.
NUMBERS_OF_A_TILE = 3 + 3


def captured_bytes(plan: KernelPlan, *, contiguous: bool = True, ones: bool = False) -> int:
    """Bytes of all that the partitions capture.

    Args:
        plan: the kernel.
        contiguous: tensors that are parameters are so along their last dimension, as they usually
            are: the compiler then knows that stride.
        ones: it captures such a stride all the same, those of all tensors as one number, as
            Triton 3.6 does and 3.7 does not.
    """
    read = _Read((*_bounds(plan), *_expressions(plan)))
    parts = 2 * (len(plan.qk_parts) + len(plan.v_parts))  # of q, k, v, out
    tiles = parts - len(plan.v_parts) * hopper_shape(plan).out_in_queries
    size = parts * ADDRESS + tiles * TILES + ADDRESS  # descriptors, tiles, lse
    arrays = BARRIER_ARRAYS - 2 * hopper_shape(plan).paired
    size += arrays * BARRIERS + NUMBERS + NUMBERS_OF_A_CALL * NUMBER
    if plan.normaliser == "softmax":  # votes, outgrown, checked
        size += 2 * NUMBERS + BARRIER * hopper_shape(plan).flat
    size += NUMBERS * bool(plan.hidden.keys)  # where values are hidden
    size += ADDRESS * HopperNames(plan).counts  # the counter
    size += NUMBER * plan.tiles.uneven  # heads_together
    if plan.listing:
        size += ADDRESS
    if plan.dropout:  # threshold, kept_scale; the seed, of 64 bits
        size += 4 * NUMBER
    if cut_table(plan):  # the list of tiles, the output
        size += 2 * ADDRESS
    size += NUMBER * bool(plan.checks_kv_len or plan.listing or "kv_len" in read.names)
    size += NUMBER * (not plan.reads_scale or "scale" in read.names)  # else qk_scale
    return size + _parameters(read, plan.kernel_arguments, contiguous=contiguous, ones=ones)


def backward_captured_bytes(
    names: HopperBackward, *, contiguous: bool = True, ones: bool = False
) -> int:
    """Bytes of all that the partitions of a kernel over tiles of keys capture.

    It is that of the one pass, or of a divided one; see `captured_bytes`.
    """
    if names.has_roles:
        # The first consumer alone has scores and mask, and captures nothing: its code is the
        # block's own. The others go by which tiles need the mask where these come first.
        visits = names.visits.bounds if names.visits.splits else names.visits.ends
        read = _Read((*visits, *_hidden(names)))
    else:
        read = _Read((*names.visits.bounds, *_backward_expressions(names), *_hidden(names)))
    size = BACKWARD_SOURCES * ADDRESS
    size += 4 * TILES + ROWS + 2 * BARRIERS  # q, grad_out, k, v; lse and delta; full and empty
    if names.divided:
        size += NUMBERS_OF_A_TILE * NUMBER + BARRIER
        # Factors and the descriptor of grad_k, or those of grad_k and grad_v.
        size += FACTORS + ADDRESS if names.has_roles else 2 * ADDRESS
        size += NUMBER * _reads_the_end_of_keys(names, read)
    else:
        size += 4 * ADDRESS  # descriptors of the gradients; the counter
        size += NUMBERS_OF_A_BACKWARD_CALL * NUMBER
        size += NUMBER * names.orders_heads  # heads_together
        size += NUMBER * names.shares  # num_shared
        if names.backward.plan.dropout:  # threshold, kept_scale; the seed, of 64 bits
            size += 4 * NUMBER
        size += 2 * MADE  # ds, grad_q
        size += 2 * BARRIERS + NUMBERS  # full and empty, of keys; numbers of tiles
        size += BARRIERS * names.grad_out_apart  # grad_out_full
    size += NUMBER * ("q_len" in read.names or names.visits.tiles.listed)
    size += ADDRESS * len(names.visits.reads)
    size += ADDRESS * len(names.text.learned)  # their sums
    size += _notes(names)
    arguments = names.backward.both_arguments
    return size + _parameters(read, arguments, contiguous=contiguous, ones=ones)


def _reads_the_end_of_keys(names: HopperBackward, read: _Read) -> bool:
    """Whether partitions of a divided pass read kv_len: for masks, stores of sums, or visits."""
    softmax = names.backward.plan.normaliser == "softmax"
    # The end of the keys is masked in all tiles, or in none that see only what all of them see.
    ends = names.masks and (softmax or not names.masks_queries)
    if names.has_roles:
        ends = ends and names.visits.splits
    stores = bool(names.text.learned)
    return (
        ends or stores or _counts_lists(names) or not read.names.isdisjoint({"kv_len", "kv_last"})
    )


def _counts_lists(names: HopperBackward) -> bool:
    """Whether lists are counted by the tiles of a head, besides how long they are."""
    listing = names.backward.plan.listing
    return listing is not None and listing.several


def queries_captured_bytes(
    names: HopperBackward, *, contiguous: bool = True, ones: bool = False
) -> int:
    """Bytes that the Gluon kernel for the gradient of q captures."""
    queries = names.of_queries
    read = _Read((*queries.visits.bounds, *_queries_expressions(names), *_hidden(names)))
    # Descriptors of q, k, v, grad_out and grad_q; the rows, and how many there are of a head.
    size = 6 * ADDRESS + (NUMBERS_OF_A_TILE + 1) * NUMBER
    size += 4 * (TILES + BARRIERS) + BARRIER + _notes(names)
    counts = _counts_lists(names)
    size += ADDRESS * len(queries.visits.reads)
    size += NUMBER * (counts or not read.names.isdisjoint({"q_len", "q_last"}))
    size += NUMBER * (queries.visits.tiles.listed or "kv_len" in read.names)
    arguments = names.backward.queries_arguments
    return size + _parameters(read, arguments, contiguous=contiguous, ones=ones)


def _parameters(read: _Read, arguments: KernelArguments, *, contiguous: bool, ones: bool) -> int:
    """Of numbers and tensors that are parameters."""
    size = NUMBER * len(read.names.intersection(arguments.scalars))
    for tensor in arguments.tensors:
        if tensor.name in read.names:
            strides = tensor.ndim - 1 - len(read.only_at_0(tensor.name, tensor.ndim - 1))
            size += ADDRESS + NUMBER * (tensor.ndim + strides + (not contiguous))
    if ones and contiguous and any(read.last_index_varies(x.name) for x in arguments.tensors):
        size += NUMBER
    return size


class _Read:
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


def _bounds(plan: KernelPlan) -> Iterator[str]:
    """Text of which tiles of keys are visited, and which need the mask."""
    tiles = plan.tiles
    if tiles.listed:
        return
    if tiles.unordered:
        yield from (tiles.unordered, "kv_len")
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
    yield from (code.score, code.shift, code.sink, *code.conditions, *plan.hidden.keys)
    if code.promise is not None:
        yield from ("kv_len", *code.promise.conditions)
    for table in code.tables:
        yield from (table.entry, table.row, table.column, table.first_row, table.first_column)


def _hidden(names: HopperBackward) -> tuple[str, ...]:
    """Text of which rows are hidden by their position alone."""
    hidden = names.backward.plan.hidden
    return (*hidden.keys, *hidden.queries)


def _notes(names: HopperBackward) -> int:
    """Of the notes which tiles have such rows."""
    hidden = names.backward.plan.hidden
    return NUMBERS * (bool(hidden.keys) + bool(hidden.queries))


def _backward_expressions(names: HopperBackward) -> Iterator[str]:
    """Text of scores, slopes and mask, with the lines that these read: others leave no code."""
    text, code = names.text, names.text.code
    lines = {a.name: a.code for a in (*text.lines_of_head, *text.lines_of_tile)}
    texts = [code.score, code.shift, text.slope, names.backward.slope_scale, *names.conditions]
    texts += [*(a.code for a in code.elements), *(item.slope for item in text.learned)]
    if code.promise is not None:
        texts += ("q_len", "kv_len", code.promise.broken, *code.promise.conditions)
    while texts:
        yield from texts
        read = mentioned(lines, texts)
        texts = [lines.pop(name) for name in read]


def _queries_expressions(names: HopperBackward) -> Iterator[str]:
    """The texts that the Gluon kernel for the gradient of q computes."""
    text = names.of_queries.text
    code = text.code
    for a in (*code.scalars, *code.rows, *code.columns, *code.elements, *code.masked):
        yield a.code
    conditions = names.of_queries.conditions
    yield from (code.score, code.shift, text.slope, names.backward.slope_scale, *conditions)
    if code.promise is not None:
        yield from ("kv_len", *code.promise.conditions)
