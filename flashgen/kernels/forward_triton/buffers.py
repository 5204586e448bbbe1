"""The buffers of a block of the portable forward kernel, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.budget.matrix_units import Unit
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, widths
from flashgen.kernels.forward_triton.elements import Elements, exchanged


@dataclass(frozen=True)
class Layout:
    """The properties of a kernel that determine its buffers.

    Attributes:
        unit: the instruction that multiplies tiles.
        tma: tiles come through descriptors, each copy with a barrier; otherwise by pointers.
        pipelined: the loop loads ahead (``num_stages > 1``).
        tf32: operands are float32, which the unit reads as tf32.
        num_qk, num_v: segments of the head dimensions; the widths are symbols.
        narrow: the narrowest segment has fewer than 32 columns.
        elements: the elements of tensors that the loop reads.
        as_output: a tile of scores has the shape of an output tile.
        sigmoid: weights are sigmoids of the scores, or products: a key's depends on no other.
        scored: a score function is computed, or an element loaded, before scores become weights.
    """

    unit: Unit
    tma: bool
    pipelined: bool
    tf32: bool
    num_qk: int
    num_v: int
    narrow: bool
    elements: Elements
    as_output: bool
    sigmoid: bool
    scored: bool


class Tiles:
    """Bytes of one tile of each segment, and of elements of tensors.

    Attributes:
        q, k, v, out: a list with a size for each segment.
        p: the softmax weights.
        rows: a float32 for each query.
        elements: elements that are copied ahead.
        before, after: exchanges before the first product, and after it.
        exchanged: both exchanges, one after the other.
    """

    def __init__(self, layout: Layout) -> None:
        self.qk_widths = widths("qk", layout.num_qk)
        self.v_widths = widths("v", layout.num_v)
        self.q = [BLOCK_M * width * ITEMSIZE for width in self.qk_widths]
        self.k = [BLOCK_N * width * ITEMSIZE for width in self.qk_widths]
        self.v = [BLOCK_N * width * ITEMSIZE for width in self.v_widths]
        self.out = [BLOCK_M * width * ITEMSIZE for width in self.v_widths]
        self.p = BLOCK_M * BLOCK_N * ITEMSIZE
        self.rows = 4 * BLOCK_M
        self.elements = layout.elements.copies()
        self.before, self.after = (
            exchanged(layout.elements, layout.unit, before=when, as_output=layout.as_output)
            for when in (True, False)
        )
        self.exchanged = sympy.Max(self.before, self.after)
