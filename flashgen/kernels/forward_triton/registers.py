"""Buffers of the units whose operands pass through registers: mma.sync, fma, mfma."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.budget.buffers import Phase, barrier_arrays
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, NUM_STAGES, NUM_WARPS
from flashgen.kernels.forward_triton.buffers import Layout, Tiles
from flashgen.symbols import FloorDiv

_ALIGNMENT = 1024
_MMA_ROWS = 16
_MFMA_ROWS = 32  # the widest matrix instruction of CDNA3 computes 32 x 32


def by_pointers(layout: Layout, tiles: Tiles) -> Phase:
    """mma.sync, and float32 products on the ordinary units; tiles by cp.async.

    The operands are read from shared memory into registers before they are used, so the stage in
    use needs no buffer of its own: ``num_stages - 1`` tiles of K and V. P stays in registers if
    warps share out rows alone.
    """
    p, scratch = _weights(layout, tiles)
    elements = tiles.exchanged
    if layout.pipelined:
        copies = NUM_STAGES - 1
        # Two-byte weights take the place of what was exchanged.
        together = scratch + elements if layout.tf32 else sympy.Max(scratch, elements - p)
        parts = (
            ("Q", sum(tiles.q)),
            ("K", copies * sum(tiles.k)),
            ("V", copies * sum(tiles.v)),
            ("elements", tiles.elements),
            ("P", p),
            ("scratch", together),
        )
        return Phase("loop", parts)
    # Loads are used where they arrive: a segment of K is gone before one of V comes.
    step = sympy.Max(*tiles.k, sympy.Max(*tiles.v) + p + scratch, elements)
    return Phase("loop", (("Q", sum(tiles.q)), ("K or V", step)))


def by_tma(layout: Layout, tiles: Tiles) -> Phase:
    """The loop on FMA units with tiles by TMA, whose layouts are not theirs: K is copied once more.

    Exact for float32 products in full precision. mma.sync, which a target with TMA uses only for
    tiles under 64 rows, may do with less.
    """
    p, scratch = _weights(layout, tiles)
    q = ("Q", sum(tiles.q))
    elements = tiles.exchanged
    fma = layout.unit == "fma"
    if not layout.pipelined:
        keys = sympy.Max(*tiles.k) * (2 if fma else 1)
        use_v = sympy.Max(*tiles.v) + p + scratch
        # What is exchanged comes beside the keys, and moves Q to its next aligned place.
        held = keys + (elements + _ALIGNMENT if layout.scored or layout.sigmoid else 8)
        step = sympy.Max(held, use_v, sympy.Max(*tiles.v) + p + 8)
        return Phase("loop", (q, ("K or V", step - 8), ("barriers", sympy.Integer(8))))
    copies = NUM_STAGES - 1
    use_v = p + scratch + (elements if layout.tf32 else 0)
    step = sympy.Max(*(tiles.k if fma else ()), use_v, elements)
    loop = (
        q,
        ("K", copies * sum(tiles.k)),
        ("V", copies * sum(tiles.v)),
        ("elements", tiles.elements),
        ("K copy or P" if fma else "P", step),
        ("barriers", barrier_arrays(layout.num_qk + layout.num_v, copies)),
    )
    return Phase("loop", loop)


def mfma(layout: Layout, tiles: Tiles) -> tuple[Phase, ...]:
    """CDNA3: Q passes through shared memory into registers before the loop.

    Tiles of K and V go from registers to shared memory and back, ``num_stages - 1`` of each. P
    stays in registers if each warp has 32 rows of its own and every product is one of 32 x 32
    instructions. The output is stored in the layout of the product.
    """
    rows_shared = BLOCK_M < _MFMA_ROWS * NUM_WARPS
    small = layout.narrow or sympy.Lt(BLOCK_N, _MFMA_ROWS)
    p = sympy.Piecewise((tiles.p, sympy.Or(rows_shared, small)), (sympy.Integer(0), True))
    read_q = Phase("read Q", (("Q", sympy.Max(*tiles.q)),))
    # Segments of V that are computed by different instructions each have P in their own layout.
    several = layout.num_v > 1
    elements = tiles.exchanged
    if not layout.pipelined:
        v = sympy.Max(*tiles.v)
        together = sympy.Piecewise((v + p, rows_shared), (sympy.Max(v, p), True))
        use_v = Phase("use V", (("V", together if several else sympy.Max(v, p)),))
        read_k = Phase("read K", (("K", sympy.Max(*tiles.k)),))
        return read_q, read_k, Phase("after QK", (("scratch", elements),)), use_v
    copies = NUM_STAGES - 1
    scratch = tiles.rows if several else sympy.Integer(0)
    scratch = sympy.Piecewise((scratch, rows_shared), (sympy.Integer(0), True))
    loop = (
        ("K", copies * sum(tiles.k)),
        ("V", copies * sum(tiles.v)),
        ("P", p),
        ("scratch", sympy.Max(scratch, elements - p)),
    )
    return read_q, Phase("loop", loop)


def _weights(layout: Layout, tiles: Tiles) -> tuple[Any, ...]:
    """P and the scratch beside it, where P passes through shared memory."""
    zero = sympy.Integer(0)
    if layout.unit == "fma":
        # The rescaling factor moves to the accumulator's layout as well. Where that layout is the
        # scores' own, for a single segment of BLOCK_N columns, it stays in its threads; for some
        # small tiles it moves inside a warp and this is 4 * BLOCK_M bytes too many. Very wide
        # tiles and many warps share out columns, up to so many to a row.
        across = sympy.Max(1, FloorDiv(BLOCK_N, 128), 4 * FloorDiv(NUM_WARPS, 16))
        moved = tiles.rows * across
        if layout.elements.some:  # whose layouts are others still
            return tiles.p, moved * sympy.Piecewise((4, BLOCK_M >= 64), (16, True))
        if layout.num_v > 1:
            return tiles.p, moved
        alike = sympy.And(sympy.Eq(BLOCK_N, tiles.v_widths[0]), sympy.Eq(across, 1))
        return tiles.p, sympy.Piecewise((zero, alike), (moved, True))
    # A tile with more columns than rows has its columns shared out among the warps; the products
    # of several segments have their rows shared out, unless something lies between them.
    few_rows = sympy.And(layout.scored, BLOCK_M < _MMA_ROWS * NUM_WARPS)
    wide = tiles.v_widths[0] > BLOCK_M if layout.num_v == 1 else sympy.false
    by_columns = sympy.Or(wide, few_rows)
    # Row maxima then meet through shared memory; two-byte types do that in the place of P.
    maxima = tiles.rows * sympy.Min(NUM_WARPS, FloorDiv(BLOCK_N, 8)) if layout.tf32 else zero
    return tuple(sympy.Piecewise((size, by_columns), (zero, True)) for size in (tiles.p, maxima))
