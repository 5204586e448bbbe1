"""The captures of the partitions of a Gluon kernel over tiles of keys."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.budget.captures import (
    ADDRESS,
    BARRIER,
    BARRIERS,
    FACTORS,
    MADE,
    NUMBER,
    NUMBERS,
    ROWS,
    TILES,
    Read,
    captured_parameters,
)
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.plan.code import codes_of
from flashgen.symbolic.printer.code import Code, read_by

# Of the one pass: num_q_heads, num_kv_heads, kv_len, rows_len, num_tiles and scale.
NUMBERS_OF_A_BACKWARD_CALL = 6

# Where the pass is split: num_q_heads, num_kv_heads and scale; batch, kv_head, kv_first, or
# batch, head, q_first.
NUMBERS_OF_A_TILE = 3 + 3


# With dropout: threshold, kept_scale; the seed, of 64 bits.
DROPPING = 2 + 2


def backward_captured_bytes(
    names: HopperBackward, *, contiguous: bool = True, ones: bool = False
) -> int:
    """Bytes of all captures of the partitions of a kernel over tiles of keys.

    The kernel belongs to a single pass, or to a split one; see `captured_bytes`.
    """
    if names.has_roles:
        # Only the first consumer has scores and mask, and it captures nothing: its code is the
        # block's own. The others only need to know which tiles are masked, if these come first, and
        # the second one what it learns.
        visits = names.visits.bounds if names.visits.splits else names.visits.ends
        learned = tuple(_with_lines(names, _learned_by_roles(names)))
        read = Read((*visits, *hidden_conditions(names), *learned), names.visits.lengths)
    else:
        expressions = (*_backward_expressions(names), *hidden_conditions(names))
        lengths = ("q_len", "kv_len") if names.text.code.promise is not None else ()
        read = Read((*names.visits.bounds, *expressions), lengths)
    segments = len(names.qk_parts) + len(names.v_parts)
    size = (2 * segments + 1) * ADDRESS  # descriptors of q, k, v, grad_out and rows
    size += 2 * segments * TILES + ROWS + 2 * BARRIERS  # likewise; lse and delta; full and empty
    if names.split:
        size += NUMBERS_OF_A_TILE * NUMBER + BARRIER
        # Factors and the descriptors of grad_k, or those of grad_k and grad_v.
        size += FACTORS + len(names.qk_parts) * ADDRESS if names.has_roles else segments * ADDRESS
        size += NUMBER * _reads_the_end_of_keys(names, read)
    else:
        sums = len(names.sums_widths)
        # Descriptors of the gradients, unless they are in parts; the counter.
        size += (segments * (not names.in_turns) + 1) * ADDRESS
        # Those of sums: for dq alone, that of the second consumer's columns.
        size += (sums if names.shares else 1) * ADDRESS
        size += NUMBERS_OF_A_BACKWARD_CALL * NUMBER
        size += NUMBER * names.orders_heads  # heads_together
        # num_whole, num_parts, parts_together, and the descriptors of parts.
        size += (3 * NUMBER + sums * ADDRESS) * names.divides
        size += NUMBER * names.shares  # num_shared
        size += 2 * MADE  # ds, grad_q
        size += 2 * BARRIERS + NUMBERS  # full and empty, of keys; numbers of tiles
        size += BARRIERS * names.grad_out_apart  # grad_out_full
    if names.backward.plan.dropout:  # with roles the first consumer draws numbers
        size += (1 if names.has_roles else DROPPING) * NUMBER
    size += NUMBER * ("q_len" in read.names or names.visits.tiles.listed)
    size += ADDRESS * len(names.visits.reads)
    size += ADDRESS * (len(names.learned) + len(names.cleared))
    # With tiles, their descriptor, views and barriers; else the tensor, to gather from.
    tiled, gathered = ADDRESS + TILES, ADDRESS + (4 + 3 + (ones or not contiguous)) * NUMBER
    if names.tiled_in_ds:
        tiled += 2 * BARRIERS
        of_call = tiled if names.arrives_in_ds else gathered
        size += of_call if contiguous else max(tiled, gathered)
    else:
        size += tiled * bool(names.tiled)
    size += notes_captured(names)
    arguments = names.backward.both_arguments
    return size + captured_parameters(read, arguments, contiguous=contiguous, ones=ones)


def _reads_the_end_of_keys(names: HopperBackward, read: Read) -> bool:
    """Whether partitions of a split pass read kv_len: for masks, stores of sums, or visits."""
    softmax = names.backward.plan.normaliser == "softmax"
    # The end of the keys is masked in all tiles, or in no full tile.
    ends = names.masks and (softmax or not names.masks_queries)
    if names.has_roles:
        ends = ends and names.visits.splits
    stores = bool(names.text.input_gradients)
    return ends or stores or counts_lists(names) or not read.names.isdisjoint({"kv_len", "kv_last"})


def counts_lists(names: HopperBackward) -> bool:
    """Whether the kernel needs the number of a head's tiles to find its list."""
    listing = names.backward.plan.listing
    return listing is not None and listing.several


def hidden_conditions(names: HopperBackward) -> tuple[Code, ...]:
    """Which rows are hidden by their position alone."""
    hidden = names.backward.plan.hidden
    return (*hidden.keys, *hidden.queries)


def notes_captured(names: HopperBackward) -> int:
    """Bytes of the notes about tiles with hidden rows."""
    hidden = names.backward.plan.hidden
    return NUMBERS * (bool(hidden.keys) + bool(hidden.queries))


def _backward_expressions(names: HopperBackward) -> Iterator[Code | None]:
    """Scores, derivatives and mask, with the lines that they read."""
    text, code = names.text, names.text.code
    codes = [
        code.score,
        code.shift,
        text.score_gradient,
        names.backward.gradient_scale,
        *names.conditions,
    ]
    codes += codes_of(code.elements, code.distances)
    codes += [item.partial for item in text.input_gradients]
    if code.promise is not None:
        codes += (code.promise.broken, *code.promise.conditions)
    yield from _with_lines(names, codes)


def _learned_by_roles(names: HopperBackward) -> list[Code | None]:
    """The code of the consumer with the gradients of scores and keys: it has no scores."""
    items, scale = names.text.input_gradients, names.backward.gradient_scale
    late = items or names.backward.plan.dropout
    return [*(item.partial for item in items), *(scale,) * bool(late)]


def _with_lines(names: HopperBackward, codes: list[Code | None]) -> Iterator[Code | None]:
    """Code, and the lines that it reads: unread lines leave no code."""
    text = names.text
    lines = {a.name: a.code for a in (*text.lines_of_head, *text.lines_of_tile)}
    while codes:
        yield from codes
        codes = [lines.pop(name) for name in read_by(codes) & lines.keys()]
