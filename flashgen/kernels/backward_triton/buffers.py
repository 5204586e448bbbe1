"""The shared memory of a block of a backward kernel, as sympy expressions.

The rules were read off the compiler, as in `flashgen.budget.buffers`;
tests/compile/test_backward.py compares the sums with the compiler's figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy

from flashgen.budget.buffers import Phase, barrier_arrays, round_up
from flashgen.budget.matrix_units import Unit
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, NUM_STAGES, NUM_WARPS, widths
from flashgen.config import BackwardKernel
from flashgen.kernels.backward_triton.elements import VisitedElements
from flashgen.symbols import FloorDiv

_MFMA_ROWS = 32
_ALIGNMENT = 1024
_EXCHANGED_BY_WARP = 512  # bytes of a tile that a warp moves at once between two layouts


@dataclass(frozen=True)
class BackwardLayout:
    """The properties of a kernel that determine its buffers.

    Attributes:
        kernel: the tiles that a program holds, ``"keys"`` or ``"queries"``.
        unit: the instruction that multiplies tiles.
        tma: tiles come through descriptors, each copy with a barrier; otherwise by pointers.
        pipelined: the loop loads ahead (``num_stages > 1``).
        tf32: operands are float32, which the unit reads as tf32.
        num_qk, num_v: segments of the head dimensions; the widths are symbols.
        sigmoid: weights are sigmoids of the scores.
        divided: weights are divided by their sum: a query has an LSE beside its delta.
        elements: the elements of tensors that the loop reads.
    """

    kernel: BackwardKernel
    unit: Unit
    tma: bool
    pipelined: bool
    tf32: bool
    num_qk: int
    num_v: int
    sigmoid: bool
    divided: bool
    elements: VisitedElements


class Tiles:
    """Bytes of one tile of each segment.

    Attributes:
        rows: the rows of the tiles that a program holds.
        held: the held tiles, of q and k's width, then of v's.
        visited_qk, visited_v: a list with a size for each segment.
        weights: a tile of p or ds.
        statistics: the LSE and delta of a tile of queries, if queries are visited.
        narrowest: the narrowest segment's width.
        held_names, visited_names: the names of q's or k's parts, and then of v's or dO's.
    """

    def __init__(self, layout: BackwardLayout) -> None:
        of_keys = layout.kernel == "keys"
        self.rows, visited = (BLOCK_N, BLOCK_M) if of_keys else (BLOCK_M, BLOCK_N)
        self.qk_widths, self.v_widths = widths("qk", layout.num_qk), widths("v", layout.num_v)
        self.held = tuple(
            [self.rows * width * ITEMSIZE for width in x] for x in (self.qk_widths, self.v_widths)
        )
        self.visited_qk = [visited * width * ITEMSIZE for width in self.qk_widths]
        self.visited_v = [visited * width * ITEMSIZE for width in self.v_widths]
        self.weights = BLOCK_M * BLOCK_N * ITEMSIZE
        statistics = (8 if layout.divided else 4) * BLOCK_M
        self.statistics = statistics if of_keys else sympy.Integer(0)
        every = (*self.qk_widths, *self.v_widths)
        self.narrowest = sympy.Min(*every)
        names = (
            ("K tile", "V tile", "Q tiles", "dO tiles") if of_keys else ("Q", "dO tile", "K", "V")
        )
        self.held_names, self.visited_names = names[:2], names[2:]

    def held_parts(self) -> tuple[tuple[str, Any], ...]:
        """The tiles that a program holds."""
        return tuple((name, sum(x)) for name, x in zip(self.held_names, self.held, strict=True))

    def visited_parts(self, qk: Any, v: Any) -> tuple[tuple[str, Any], ...]:
        """The bytes of visited tiles."""
        return tuple(zip(self.visited_names, (qk, v), strict=True))

    def copies(self, number: Any) -> tuple[tuple[str, Any], ...]:
        """This number of tiles of each visited tensor."""
        return self.visited_parts(number * sum(self.visited_qk), number * sum(self.visited_v))

    @property
    def output(self) -> Phase:
        """Gradients on their way to rows that a warp can store at once."""
        return Phase("output", (("output", sympy.Max(*self.held[0], *self.held[1])),))


@cache
def backward_phases(layout: BackwardLayout) -> tuple[Phase, ...]:
    """The phases of a kernel of this layout; a block needs the largest of their totals."""
    tiles = Tiles(layout)
    if layout.unit == "mfma":
        return _mfma(layout, tiles)
    if layout.unit == "wgmma":
        return _wgmma(layout, tiles), tiles.output
    if layout.unit == "tcgen05":
        return _tcgen05(layout, tiles), tiles.output
    return _registers(layout, tiles), tiles.output


def _loop(
    layout: BackwardLayout,
    tiles: Tiles,
    *parts: tuple[str, Any],
    free: Any = 0,
    free_before: Any = 0,
) -> Phase:
    """The loop, with the parts that most units need: held tiles, and reads for each visited tile.

    free: bytes of parts that are not in use while dropout's words change layout.
    free_before: bytes of parts that are not in use before weights exist.
    """
    kept = sympy.Max(0, layout.elements.kept - free)
    unordered = sympy.Max(0, layout.elements.unordered - free_before)
    ahead = NUM_STAGES - 1 if layout.pipelined else sympy.Integer(0)
    return Phase(
        "loop",
        (
            *tiles.held_parts(),
            *parts,
            ("LSE, delta", ahead * tiles.statistics),
            ("elements", ahead * layout.elements.ahead),
            ("scratch", sympy.Max(layout.elements.exchanged, kept, unordered)),
        ),
    )


def _registers(layout: BackwardLayout, tiles: Tiles) -> Phase:
    """mma.sync, and float32 products on the ordinary units, whose operands are in registers.

    The stage in use needs no buffer of its own: ``num_stages - 1`` of each tile.
    """
    by_columns = tiles.qk_widths[-1] > tiles.rows  # as of the step's last product
    weights = sympy.Piecewise((tiles.weights, by_columns), (sympy.Integer(0), True))
    if layout.unit == "fma":
        weights = tiles.weights
    ahead = NUM_STAGES - 1
    largest = sympy.Max(*tiles.visited_qk, *tiles.visited_v)
    if layout.pipelined and (layout.tma or not layout.tf32):
        barriers: Any = sympy.Integer(0)
        copied: Any = sympy.Integer(0)
        if layout.tma:
            barriers = barrier_arrays(layout.num_qk + layout.num_v, ahead)
        if layout.tma and layout.unit == "fma":  # reads other layouts than TMA writes
            tile = sympy.Max(sum(tiles.visited_qk), sum(tiles.visited_v))
            copied = sympy.Max(0, tile - weights) + (tile if layout.kernel == "keys" else 0)
        parts = (("P or dS", weights), ("pieces", copied), ("barriers", barriers))
        before = sympy.Integer(0) if layout.tf32 else weights
        return _loop(layout, tiles, *tiles.copies(ahead), *parts, free_before=before)
    # A tile that products read both straight and transposed comes in registers, and goes to
    # shared memory for one of them. For the other it changes layout in pieces, unless columns are
    # shared out among the warps.
    wide = sympy.Max(1, FloorDiv(sympy.Max(*tiles.qk_widths, *tiles.v_widths), 64))
    pieces = sympy.Min(largest, _EXCHANGED_BY_WARP * NUM_WARPS * wide)
    piece = sympy.Piecewise((largest, by_columns), (pieces, True))
    if layout.unit == "fma":
        piece = largest
    qk, v = sum(tiles.visited_qk), sum(tiles.visited_v)
    if layout.kernel == "queries" and layout.pipelined:
        v *= ahead
    together = layout.pipelined or layout.tf32
    return _loop(
        layout,
        tiles,
        *tiles.visited_parts(qk, v),
        ("P or dS", weights if together else sympy.Max(0, weights - piece)),
        ("pieces", piece),
        ("barriers", sympy.Integer(8 if layout.tma else 0)),
        free_before=sympy.Integer(0) if layout.pipelined else v,
    )


def _wgmma(layout: BackwardLayout, tiles: Tiles) -> Phase:
    """Wgmma reads tiles in place: the stage in use keeps its buffer, ``num_stages`` of each.

    Segments of a tile that are used together wait at one barrier.
    """
    if not layout.pipelined:
        return _in_turns(layout, tiles)
    stages: Any = NUM_STAGES
    if not layout.tf32:
        barriers = barrier_arrays(2, stages) if layout.tma else sympy.Integer(0)
        return _loop(layout, tiles, *tiles.copies(stages), ("barriers", barriers))
    # Only two-byte operands are read transposed: a tile that products read both ways is there
    # twice, and its copy takes the place of a stage.
    if layout.tma:
        barriers = barrier_arrays(layout.num_qk + layout.num_v, stages - 1)
        if layout.kernel == "queries":
            of_v = layout.num_v * round_up(8 * stages, 16)
            barriers = of_v + barrier_arrays(layout.num_qk, stages - 1)
        return _loop(layout, tiles, *tiles.copies(stages), ("barriers", barriers))
    qk, v = sum(tiles.visited_qk), sum(tiles.visited_v)
    if layout.kernel == "keys":
        twice = sympy.Max(qk, 2 * v)
        return _loop(layout, tiles, *tiles.visited_parts(qk, twice))
    return _loop(layout, tiles, *tiles.visited_parts(2 * qk, stages * v))


def _in_turns(layout: BackwardLayout, tiles: Tiles) -> Phase:
    """One stage of warp groups: tiles one after the other, and at most one wait at a time."""
    waits = layout.tma or layout.unit == "tcgen05"
    barriers = 8 if waits else 0
    qk, v = sum(tiles.visited_qk), sum(tiles.visited_v)
    skipped: Any = 0
    if layout.tf32 and layout.kernel == "keys":
        v *= 2
        barriers = 8 if layout.unit == "tcgen05" else 0
    elif layout.tf32 and waits:
        skipped = _ALIGNMENT - barriers
    if layout.unit == "tcgen05":
        skipped += layout.elements.skipped
    elif layout.tma:  # behind a barrier the tile comes that lies beside two buffers of one size
        alike = sympy.Eq(layout.elements.unordered, v)
        skipped += sympy.Piecewise((_ALIGNMENT - barriers, alike), (sympy.Integer(0), True))
    names = (("barriers", sympy.Integer(barriers)), ("alignment", sympy.sympify(skipped)))
    free = sympy.Integer(barriers) if layout.kernel == "keys" else v
    before = v + barriers + skipped
    parts = tiles.visited_parts(qk, v)
    return _loop(layout, tiles, *parts, *names, free=free, free_before=before)


def _tcgen05(layout: BackwardLayout, tiles: Tiles) -> Phase:
    """tcgen05 runs beside its warps: a tile stays until the last product that reads it is done.

    That is a step later where the products of the step's end read it too, and one more for each
    segment that is read before the last.
    """
    if not layout.pipelined:
        return _in_turns(layout, tiles)
    of_keys = layout.kernel == "keys"
    qk = [NUM_STAGES + n for n in range(layout.num_qk, 0, -1)]
    v = [NUM_STAGES + n if of_keys else NUM_STAGES for n in range(layout.num_v, 0, -1)]
    # A product's barriers: two, to be waited for in turns.
    barriers = sympy.Integer(16 * (2 * layout.num_qk + (2 if of_keys else 1) * layout.num_v))
    if layout.tma:
        barriers += sum(round_up(8 * stages, 16) for stages in (*qk, *v))
    copies = 0
    if layout.tf32:  # operands of other layouts, as of wgmma, are copies
        copies = 2
        if not layout.tma:
            qk, v = [1] * len(qk), [1] * len(v) if of_keys else v
            barriers = sympy.Integer(16 * (layout.num_qk + layout.num_v) + 8)
    of_qk = sum((n + copies) * size for n, size in zip(qk, tiles.visited_qk, strict=True))
    more = copies if of_keys else 0
    of_v = sum((n + more) * size for n, size in zip(v, tiles.visited_v, strict=True))
    names = (("barriers", barriers), ("sums", sympy.sympify(layout.elements.summed)))
    return _loop(layout, tiles, *tiles.visited_parts(of_qk, of_v), *names)


def _mfma(layout: BackwardLayout, tiles: Tiles) -> tuple[Phase, ...]:
    """CDNA3: the held tiles pass through shared memory into registers before the loop.

    Visited ones go from registers to shared memory and back, ``num_stages - 1`` of each. Weights
    stay in registers if each warp has 32 rows of its own and every product is one of 32 x 32
    instructions. The gradients are stored in the layout of the products. A kernel over
    keys has both p and ds there; up to Triton 3.8 one after the other in the same place, with 3.9
    it may be each in its own.
    """
    # Every warp has all of a small product. One of fewer visited rows than held ones, or of float32
    # with a side of 16, is of other instructions than the next.
    held, visited = tiles.rows, BLOCK_M if layout.kernel == "keys" else BLOCK_N
    full_sides = sympy.And(sympy.Eq(BLOCK_M, _MFMA_ROWS), sympy.Eq(BLOCK_N, _MFMA_ROWS))
    alike = sympy.Or(full_sides, sympy.And(ITEMSIZE < 4, visited >= held))
    one_product = sympy.And(BLOCK_M <= _MFMA_ROWS, BLOCK_N <= _MFMA_ROWS, alike)
    few_rows = sympy.And(tiles.rows < _MFMA_ROWS * NUM_WARPS, sympy.Not(one_product))
    narrow = tiles.narrowest < _MFMA_ROWS
    weights = sympy.Piecewise((tiles.weights, sympy.Or(few_rows, narrow)), (sympy.Integer(0), True))
    if layout.kernel == "keys" and (layout.sigmoid or layout.pipelined):
        weights *= 2  # p and ds; of sigmoids ds needs p once more
    read = Phase("read tiles", (("tile", sympy.Max(*tiles.held[0], *tiles.held[1])),))
    exchanged = layout.elements.exchanged
    if layout.pipelined:
        copies = tiles.copies(NUM_STAGES - 1)
        scratch = exchanged + sympy.Max(0, layout.elements.kept - weights)
        return read, Phase("loop", (*copies, ("P or dS", weights), ("scratch", scratch)))
    # Narrow products are of other instructions, with weights in a layout of their own.
    largest = sympy.Max(*tiles.visited_qk, *tiles.visited_v)
    beside = sympy.Piecewise(
        (weights, sympy.And(few_rows, narrow)), (sympy.Max(0, weights - largest), True)
    )
    loop = Phase("loop", (("tile", largest), ("P or dS", beside), ("scratch", exchanged)))
    return read, loop, Phase("kept", (("scratch", layout.elements.kept),))
