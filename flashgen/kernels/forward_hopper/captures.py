"""The captures of the Gluon forward kernel's partitions; see `flashgen.budget.captures`."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.budget.captures import (
    ADDRESS,
    BARRIER,
    BARRIERS,
    NUMBER,
    NUMBERS,
    TILES,
    Read,
    captured_parameters,
)
from flashgen.kernels.forward_hopper.plan import HopperNames
from flashgen.kernels.forward_hopper.shape import hopper_shape, segment_table
from flashgen.plan import KernelPlan
from flashgen.plan.code import codes_of
from flashgen.symbolic.printer.code import Code

# Arrays of barriers: full and empty, of queries, keys, values and what is handed over; keys and
# values may share theirs.
BARRIER_ARRAYS = 8

# Whatever the mask: num_q_heads, num_kv_heads, q_len, num_tiles_m, num_tiles, lse_rows.
NUMBERS_OF_A_CALL = 6


def captured_bytes(plan: KernelPlan, *, contiguous: bool = True, ones: bool = False) -> int:
    """Bytes of all captures of the partitions.

    Args:
        plan: the kernel.
        contiguous: tensor parameters are contiguous along their last dimension, as usual, so that
            the compiler knows that stride.
        ones: the compiler captures such a stride nevertheless, one number for all tensors, as
            Triton 3.6 does and 3.7 does not.
    """
    promises = plan.promise is not None
    read = Read((*_bounds(plan), *_expressions(plan)), ("kv_len",) * promises)
    parts = 2 * (len(plan.qk_parts) + len(plan.v_parts))  # of q, k, v, out
    tiles = parts - len(plan.v_parts) * hopper_shape(plan).out_in_queries
    size = parts * ADDRESS + tiles * TILES + ADDRESS  # descriptors, tiles, lse
    arrays = BARRIER_ARRAYS - 2 * hopper_shape(plan).fused_kv_stages
    size += arrays * BARRIERS + NUMBERS + NUMBERS_OF_A_CALL * NUMBER
    if plan.normaliser == "softmax":  # votes, overflowed, checked
        size += 2 * NUMBERS + BARRIER * hopper_shape(plan).overlapped_tiles
    size += NUMBERS * bool(plan.hidden.keys)  # where values are hidden
    names = HopperNames(plan)
    size += ADDRESS * names.counts  # the counter
    size += NUMBERS * (names.hands_visits + len(names.handed.columns))
    size += NUMBER * plan.tiles.uneven  # heads_together
    if plan.listing:
        size += ADDRESS
    if plan.dropout:  # threshold, kept_scale; the seed, of 64 bits
        size += 4 * NUMBER
    if segment_table(plan):  # the list of tiles, the output
        size += 2 * ADDRESS
    size += NUMBER * bool(plan.checks_kv_len or plan.listing or "kv_len" in read.names)
    size += NUMBER * (not plan.reads_scale or plan.products or "scale" in read.names)
    return size + captured_parameters(read, plan.kernel_arguments, contiguous=contiguous, ones=ones)


def _bounds(plan: KernelPlan) -> Iterator[Code | None]:
    """Which tiles of keys are visited, and which need the mask."""
    tiles = plan.tiles
    if tiles.listed:
        return
    yield tiles.unordered
    masks = bool(plan.code.conditions or plan.checks_kv_len)
    for run in tiles.runs:
        yield from (run.end, run.condition)
        if not tiles.from_key_0:
            yield run.begin
        if masks:
            yield from (run.full_end, None if tiles.from_key_0 else run.full_begin)


def _expressions(plan: KernelPlan) -> Iterator[Code | None]:
    """Scores, mask and sink."""
    code = plan.code
    yield from codes_of(code.scalars, code.rows, code.columns, code.elements, code.masked)
    yield from (code.score, code.shift, code.sink, *code.conditions, *plan.hidden.keys)
    if code.promise is not None:
        yield from code.promise.conditions
    for table in code.tables:
        yield from table.codes
