"""The captures of the partitions of the Gluon kernel for the gradient of q."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.budget.captures import (
    ADDRESS,
    BARRIER,
    BARRIERS,
    NUMBER,
    ROWS,
    TILES,
    Read,
    captured_parameters,
)
from flashgen.kernels.backward_hopper.captures import (
    DROPPING,
    NUMBERS_OF_A_TILE,
    counts_lists,
    hidden_conditions,
    notes_captured,
)
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan.code import codes_of
from flashgen.symbolic.printer.code import Code


def queries_captured_bytes(
    names: HopperBackwardSplit, *, contiguous: bool = True, ones: bool = False
) -> int:
    """Bytes that the Gluon kernel for the gradient of q captures."""
    queries = names.of_queries
    expressions = (*_queries_expressions(names), *hidden_conditions(names))
    promises = queries.text.code.promise is not None
    read = Read((*queries.visits.bounds, *expressions), ("kv_len",) * promises)
    of_qk, of_v = len(names.qk_parts), len(names.v_parts)
    # Descriptors of q, k, v, grad_out and grad_q; the rows, and their number for each head.
    size = (3 * of_qk + 2 * of_v + 1) * ADDRESS + (NUMBERS_OF_A_TILE + 1) * NUMBER
    size += 2 * (of_qk + of_v) * TILES + 4 * BARRIERS + BARRIER + notes_captured(names)
    counts = counts_lists(names)
    size += ADDRESS * len(queries.visits.reads)
    learned = queries.learned
    size += ADDRESS * len(learned.pointers)
    if learned.diagonals:  # num_tiles; the tile of their sums
        size += NUMBER + ROWS
    if learned.stored:  # the tile of their gradients
        size += ROWS
    if names.backward.plan.dropout:
        size += DROPPING * NUMBER
    counts |= bool(learned.rows)
    size += NUMBER * (counts or not read.names.isdisjoint({"q_len", "q_last"}))
    by_keys = queries.visits.tiles.listed or bool(learned.diagonals)
    size += NUMBER * (by_keys or "kv_len" in read.names)
    arguments = names.backward.queries_arguments
    return size + captured_parameters(read, arguments, contiguous=contiguous, ones=ones)


def _queries_expressions(names: HopperBackwardSplit) -> Iterator[Code | None]:
    """The code of the Gluon kernel for the gradient of q."""
    text = names.of_queries.text
    code = text.code
    yield from codes_of(
        code.scalars, code.rows, code.columns, code.elements, code.distances, code.masked
    )
    conditions = names.of_queries.conditions
    yield from (
        code.score,
        code.shift,
        text.score_gradient,
        *(item.partial for item in text.input_gradients),
        *(index for item in text.input_gradients for index in item.indices),
        names.backward.gradient_scale,
        *conditions,
    )
    if code.promise is not None:
        yield from code.promise.conditions
