"""What a block holds in shared memory, buffer by buffer, as sympy expressions.

Triton gives buffers that are alive together places of their own, so a block asks for the largest
sum over the kernel's phases: reading Q, the loop over the keys, writing the output. Which buffers
a phase has depends on the matrix unit that computes the tiles, on how tiles are copied, and on
whether the loop is software-pipelined. `phases` lists them; `flashgen.budget.sram` adds them up.

Every rule here was read off the compiler: its intermediate code names each buffer and its place.
tests/compile/test_sram_sweep.py holds the sums to the compiler's figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy

from flashgen.symbols import FloorDiv

Unit = Literal["mma.sync", "wgmma", "tcgen05", "mfma", "fma"]

BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, ITEMSIZE = sympy.symbols(
    "BLOCK_M BLOCK_N num_warps num_stages itemsize", integer=True, positive=True
)

#: What the parts of a phase are, in plain words.
MEANINGS = {
    "Q": "the query tile, read by every step of the loop",
    "K": "key tiles, one for each stage in flight",
    "V": "value tiles, one for each stage in flight",
    "K or V": "a tile of keys, then one of values (and P) in its place",
    "K copy or P": "a key tile in the layout that the unit reads, then P in its place",
    "V copy": "value tiles in the layout that the matrix unit reads",
    "P": "the softmax weights on their way from one product's layout to the other's",
    "barriers": "8 bytes for each copy or product that a warp waits for",
    "scratch": "values that change threads between two layouts",
    "alignment": "bytes skipped before a query tile, which the hardware wants aligned",
    "output": "a tile of the output on its way to rows that a warp can store at once",
}

_SWIZZLE_ROWS, _LARGEST_ALIGNMENT = 8, 1024  # a tile starts at a multiple of 8 of its rows
_MFMA_ROWS = 32  # the widest matrix instruction of CDNA3 computes 32 x 32


@dataclass(frozen=True)
class Layout:
    """What decides which buffers there are.

    Attributes:
        unit: the instruction that multiplies tiles.
        tma: tiles come through descriptors, each copy with a barrier; otherwise by pointers.
        pipelined: the loop loads ahead (``num_stages > 1``).
        tf32: operands are float32, which the unit reads as tf32.
        num_qk, num_v: segments of the head dimensions; the widths are symbols.
        narrow: the narrowest segment has fewer than 32 columns.
    """

    unit: Unit
    tma: bool
    pipelined: bool
    tf32: bool
    num_qk: int
    num_v: int
    narrow: bool


@dataclass(frozen=True)
class Phase:
    """Buffers that are alive together: names of `MEANINGS`, and bytes."""

    name: str
    parts: tuple[tuple[str, Any], ...]

    @property
    def total(self) -> Any:
        """Bytes of all parts."""
        return sympy.Add(*(size for _, size in self.parts))


def widths(prefix: str, count: int) -> tuple[Any, ...]:
    """The symbols of segment widths, widest first: ``qk_0, qk_1, ...``."""
    return tuple(sympy.Symbol(f"{prefix}_{i}", integer=True, positive=True) for i in range(count))


@cache
def phases(layout: Layout) -> tuple[Phase, ...]:
    """The phases of a kernel of this layout; a block needs the largest of their totals."""
    tiles = _Tiles(layout)
    if layout.unit == "mfma":
        return _mfma(layout, tiles)
    output = Phase("output", (("output", sympy.Max(*tiles.out)),))
    if layout.unit in ("wgmma", "tcgen05"):
        return (_warp_group(layout, tiles), output)
    if layout.tma:
        return (*_registers_by_tma(layout, tiles), output)
    return (_registers(layout, tiles), output)


class _Tiles:
    """Bytes of one tile of each segment."""

    def __init__(self, layout: Layout) -> None:
        self.qk_widths = widths("qk", layout.num_qk)
        self.v_widths = widths("v", layout.num_v)
        self.q = [BLOCK_M * width * ITEMSIZE for width in self.qk_widths]
        self.k = [BLOCK_N * width * ITEMSIZE for width in self.qk_widths]
        self.v = [BLOCK_N * width * ITEMSIZE for width in self.v_widths]
        self.out = [BLOCK_M * width * ITEMSIZE for width in self.v_widths]
        self.p = BLOCK_M * BLOCK_N * ITEMSIZE
        self.rows = 4 * BLOCK_M  # a float32 for each query row


def _registers(layout: Layout, tiles: _Tiles) -> Phase:
    """mma.sync, and float32 products on the ordinary units; tiles by cp.async.

    The operands are read from shared memory into registers before they are used, so the stage in
    use needs no buffer of its own: ``num_stages - 1`` tiles of K and V. P stays in registers if
    warps share out rows alone.
    """
    p, scratch = _weights(layout, tiles)
    if layout.pipelined:
        copies = NUM_STAGES - 1
        keys = (("K", copies * sum(tiles.k)), ("V", copies * sum(tiles.v)))
        return Phase("loop", (("Q", sum(tiles.q)), *keys, ("P", p), ("scratch", scratch)))
    # Loads are used where they arrive: a segment of K is gone before one of V comes.
    step = sympy.Max(*tiles.k, sympy.Max(*tiles.v) + p + scratch)
    return Phase("loop", (("Q", sum(tiles.q)), ("K or V", step)))


def _weights(layout: Layout, tiles: _Tiles) -> tuple[Any, Any]:
    """P and the scratch beside it, where P passes through shared memory."""
    zero = sympy.Integer(0)
    if layout.unit == "fma":
        # The rescaling factor moves to the accumulator's layout as well. Where that layout is the
        # scores' own, for a single segment of BLOCK_N columns, it stays in its threads; for some
        # small tiles it moves inside a warp and this is 4 * BLOCK_M bytes too many. Very wide
        # tiles and many warps share out columns, up to so many to a row.
        across = sympy.Max(1, FloorDiv(BLOCK_N, 128), 4 * FloorDiv(NUM_WARPS, 16))
        moved = tiles.rows * across
        if layout.num_v > 1:
            return tiles.p, moved
        alike = sympy.And(sympy.Eq(BLOCK_N, tiles.v_widths[0]), sympy.Eq(across, 1))
        return tiles.p, sympy.Piecewise((zero, alike), (moved, True))
    if layout.num_v > 1:
        return zero, zero
    # A tile with more columns than rows has its columns shared out among the warps. Row maxima
    # then meet through shared memory; two-byte types do that in the place of P.
    wide = sympy.Lt(BLOCK_M, tiles.v_widths[0])
    maxima = tiles.rows * sympy.Min(NUM_WARPS, FloorDiv(BLOCK_N, 8)) if layout.tf32 else zero
    return sympy.Piecewise((tiles.p, wide), (zero, True)), sympy.Piecewise(
        (maxima, wide), (zero, True)
    )


def _registers_by_tma(layout: Layout, tiles: _Tiles) -> tuple[Phase, ...]:
    """The same units, tiles by TMA: those layouts are not theirs, so tiles are copied once more.

    Q moves to registers before the loop. Exact for float32 products; for mma.sync, which a target
    with TMA uses only for tiles under 64 rows, it counts a copy of K that need not be there.
    """
    p, scratch = _weights(layout, tiles)
    read_q = Phase("read Q", (("Q", sum(tiles.q)), ("barriers", sympy.Integer(8))))
    if not layout.pipelined:
        read_k = Phase("read K", (("K", 2 * sympy.Max(*tiles.k)), ("barriers", sympy.Integer(8))))
        use_v = (("V", sympy.Max(*tiles.v)), ("P", p), ("scratch", sympy.Max(scratch, 8)))
        return read_q, read_k, Phase("use V", use_v)
    copies = NUM_STAGES - 1
    step = sympy.Max(*tiles.k, p)
    loop = (
        ("K", copies * sum(tiles.k)),
        ("V", copies * sum(tiles.v)),
        ("K copy or P", step),
        ("scratch", scratch),
        ("barriers", _barriers(layout.num_qk + layout.num_v, copies)),
    )
    return read_q, Phase("loop", loop)


def _warp_group(layout: Layout, tiles: _Tiles) -> Phase:
    """Instructions of whole warp groups, wgmma and tcgen05, read K and V in place.

    The stage in use keeps its buffer while the next tiles arrive: ``num_stages`` tiles of K and V.
    P goes through registers (wgmma) or tensor memory (tcgen05).
    """
    keys, first = _keys(layout, tiles)
    barriers = _waits(layout)
    scratch = _relayout(layout, tiles)
    parts = (("Q", sum(tiles.q)), *keys)
    if not layout.pipelined:
        # One wait or one change of layout at a time: they take turns in one place.
        small = sympy.Max(barriers, scratch)
        names = (("barriers", barriers), ("scratch", small - barriers))
    else:
        small = barriers + scratch
        names = (("barriers", barriers), ("scratch", scratch))
    skipped = _alignment(tiles, first, small)
    if layout.unit == "tcgen05":
        # With 64 rows the query tile may also come between the scratch and the barriers.
        between = sympy.Max(skipped, _alignment(tiles, first, scratch))
        skipped = sympy.Piecewise((between, sympy.Lt(BLOCK_M, 128)), (skipped, True))
    return Phase("loop", (*parts, *names, ("alignment", skipped)))


def _keys(layout: Layout, tiles: _Tiles) -> tuple[tuple[tuple[str, Any], ...], Any]:
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
        copy = _up(8 * NUM_STAGES, 16) if layout.tma else sympy.Integer(0)
        return products * (copy + 16)
    if not layout.tma:
        return sympy.Integer(0)
    if layout.tf32:
        return layout.num_qk * _up(8 * NUM_STAGES, 16) + _barriers(layout.num_v, NUM_STAGES - 1)
    return _barriers(products, NUM_STAGES)


def _relayout(layout: Layout, tiles: _Tiles) -> Any:
    """tcgen05 with two warp groups hands values from one to the other when a layout changes."""
    if layout.unit != "tcgen05":
        return sympy.Integer(0)
    rows = sympy.Max(tiles.rows, 512)
    values = sympy.Integer(4096) if not layout.pipelined and not layout.tf32 else rows
    return sympy.Piecewise((values, NUM_WARPS > 4), (sympy.Integer(0), True))


def _alignment(tiles: _Tiles, first: Any, small: Any) -> Any:
    """Bytes between the small buffers and a query tile that is placed after them.

    Triton places buffers by size. A segment of Q as large as any buffer of the loop comes first
    and everything is aligned; a smaller one comes after the loop's barriers and scratch, and the
    widest such segment starts at the next multiple of its alignment. Nothing is skipped where
    there is nothing small.
    """
    cases = []
    for width, size in zip(tiles.qk_widths, tiles.q, strict=True):
        to = sympy.Min(_LARGEST_ALIGNMENT, _SWIZZLE_ROWS * width * ITEMSIZE)
        cases.append((_up(small, to) - small, size < first))
    return sympy.Piecewise(*cases, (sympy.Integer(0), True))


def _mfma(layout: Layout, tiles: _Tiles) -> tuple[Phase, ...]:
    """CDNA3: Q passes through shared memory into registers before the loop.

    Tiles of K and V go from registers to shared memory and back, ``num_stages - 1`` of each. P
    stays in registers if each warp has 32 rows of its own and every product is one of 32 x 32
    instructions. The output is stored as it lies.
    """
    rows_shared = BLOCK_M < _MFMA_ROWS * NUM_WARPS
    small = layout.narrow or sympy.Lt(BLOCK_N, _MFMA_ROWS)
    p = sympy.Piecewise((tiles.p, sympy.Or(rows_shared, small)), (sympy.Integer(0), True))
    read_q = Phase("read Q", (("Q", sympy.Max(*tiles.q)),))
    # Segments of V that are computed by different instructions each have P in their own layout.
    several = layout.num_v > 1
    if not layout.pipelined:
        v = sympy.Max(*tiles.v)
        together = sympy.Piecewise((v + p, rows_shared), (sympy.Max(v, p), True))
        use_v = Phase("use V", (("V", together if several else sympy.Max(v, p)),))
        return read_q, Phase("read K", (("K", sympy.Max(*tiles.k)),)), use_v
    copies = NUM_STAGES - 1
    scratch = tiles.rows if several else sympy.Integer(0)
    loop = (
        ("K", copies * sum(tiles.k)),
        ("V", copies * sum(tiles.v)),
        ("P", p),
        ("scratch", sympy.Piecewise((scratch, rows_shared), (sympy.Integer(0), True))),
    )
    return read_q, Phase("loop", loop)


def _barriers(arrays: int, length: Any) -> Any:
    """Arrays of 8-byte barriers, each starting at a multiple of 16."""
    return (arrays - 1) * _up(8 * length, 16) + 8 * length


def _up(size: Any, multiple: Any) -> Any:
    return multiple * FloorDiv(size + multiple - 1, multiple)
