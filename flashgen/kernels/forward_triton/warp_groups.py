"""Buffers of the units that work on whole warp groups: wgmma and tcgen05."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.budget.buffers import Phase, barrier_arrays, round_up
from flashgen.budget.quantities import BLOCK_M, ITEMSIZE, NUM_STAGES, NUM_WARPS
from flashgen.kernels.forward_triton.buffers import Layout, Tiles
from flashgen.symbols import FloorDiv

_SWIZZLE_ROWS, _LARGEST_ALIGNMENT = 8, 1024  # a tile starts at a multiple of 8 of its rows


def warp_groups(layout: Layout, tiles: Tiles) -> tuple[Phase, ...]:
    """Instructions of whole warp groups, wgmma and tcgen05, read K and V in place.

    The stage in use keeps its buffer while the next tiles arrive: ``num_stages`` tiles of K and V.
    P goes through registers (wgmma) or tensor memory (tcgen05).
    """
    keys, first = _keys(layout, tiles)
    barriers = _waits(layout)
    scratch = _relayout(layout, tiles)
    q = ("Q", sum(tiles.q))
    if layout.pipelined:
        scratch = sympy.Max(scratch, tiles.exchanged)
        ahead = ("elements", tiles.elements)
        return (Phase("loop", (q, *keys, ahead, ("barriers", barriers), ("scratch", scratch))),)
    # One wait or one change of layout at a time: they take turns in one place.
    small = sympy.Max(barriers, scratch)
    skipped = _alignment(tiles, first, small)
    if layout.unit == "tcgen05":
        # With 64 rows the query tile may also come between the scratch and the barriers.
        between = sympy.Max(skipped, _alignment(tiles, first, scratch))
        skipped = sympy.Piecewise((between, sympy.Lt(BLOCK_M, 128)), (skipped, True))
    names = (("barriers", barriers), ("scratch", small - barriers), ("alignment", skipped))
    loop = Phase("loop", (q, *keys, *names))
    if not layout.elements.some:  # only what dropout keeps, when the keys are not needed any more
        kept = Phase("kept", (q, ("scratch", tiles.after)))
        return (loop, kept) if layout.elements.exchanges else (loop,)
    # Half a unit's rows cross over besides.
    half = sympy.Piecewise((4096, sympy.Lt(BLOCK_M, 128)), (sympy.Integer(0), True))
    cross = half if layout.unit == "tcgen05" else sympy.Integer(0)
    k = ("K", sympy.Max(*tiles.k))
    held = (k,) if layout.unit == "tcgen05" else ()
    return (
        loop,
        Phase("before QK", (q, k, ("scratch", tiles.before + cross))),
        Phase("after QK", (q, *held, ("scratch", tiles.after + cross))),
    )


def _keys(layout: Layout, tiles: Tiles) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """The K and V buffers, and the largest single one."""
    if not layout.pipelined:
        largest = sympy.Max(*tiles.k, *tiles.v)
        if layout.unit == "tcgen05":  # 16 warps may have all segments at once
            others = sympy.Max(sum(tiles.k), sum(tiles.v)) - largest
            largest += others * sympy.Min(1, FloorDiv(NUM_WARPS, 16))
        return (("K or V", largest),), largest
    k, v = NUM_STAGES * sum(tiles.k), NUM_STAGES * sum(tiles.v)
    first = NUM_STAGES * sympy.Max(*tiles.k, *tiles.v)
    if not (layout.tf32 and layout.tma):
        return (("K", k), ("V", v)), first
    # Units read a transposed operand of two-byte elements only: V as tf32 is copied once more.
    if layout.unit == "tcgen05":
        return (("K", k), ("V", v), ("V copy", 2 * sum(tiles.v))), first
    waiting = NUM_STAGES - 1
    first = sympy.Max(NUM_STAGES * sympy.Max(*tiles.k), waiting * sympy.Max(*tiles.v))
    return (("K", k), ("V", waiting * sum(tiles.v)), ("V copy", sympy.Max(*tiles.v))), first


def _waits(layout: Layout) -> Any:
    """Barriers: of each copy by TMA and, as tcgen05 runs beside its warps, of each product."""
    products = layout.num_qk + layout.num_v
    if not layout.pipelined:
        return sympy.Integer(8 if layout.tma or layout.unit == "tcgen05" else 0)
    if layout.unit == "tcgen05":
        copy = round_up(8 * NUM_STAGES, 16) if layout.tma else sympy.Integer(0)
        return products * (copy + 16)
    if not layout.tma:
        return sympy.Integer(0)
    if layout.tf32:
        return layout.num_qk * round_up(8 * NUM_STAGES, 16) + barrier_arrays(
            layout.num_v, NUM_STAGES - 1
        )
    return barrier_arrays(products, NUM_STAGES)


def _relayout(layout: Layout, tiles: Tiles) -> Any:
    """tcgen05 with two warp groups hands values from one to the other when a layout changes."""
    if layout.unit != "tcgen05":
        return sympy.Integer(0)
    rows = sympy.Max(tiles.rows, 512) * (2 if layout.sigmoid else 1)
    values = sympy.Integer(4096) if not layout.pipelined and not layout.tf32 else rows
    return sympy.Piecewise((values, NUM_WARPS > 4), (sympy.Integer(0), True))


def _alignment(tiles: Tiles, first: Any, small: Any) -> Any:
    """Bytes between the small buffers and a query tile that is placed after them.

    Triton places buffers by size. A segment of Q as large as any buffer of the loop comes first
    and everything is aligned; a smaller one comes after the loop's barriers and scratch, and the
    widest such segment starts at the next multiple of its alignment. Nothing is skipped where
    there is nothing small.
    """
    cases = []
    for width, size in zip(tiles.qk_widths, tiles.q, strict=True):
        to = sympy.Min(_LARGEST_ALIGNMENT, _SWIZZLE_ROWS * width * ITEMSIZE)
        cases.append((round_up(small, to) - small, size < first))
    return sympy.Piecewise(*cases, (sympy.Integer(0), True))
