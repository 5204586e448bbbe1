"""What a block holds in shared memory: the parts that buffers are made of, as sympy expressions.

Triton gives buffers that are alive together places of their own, so a block asks for the largest
sum over the kernel's phases: reading Q, the loop over the keys, writing the output. Which buffers
a phase has depends on the matrix unit that computes the tiles, on how tiles are copied, and on
whether the loop is software-pipelined: `flashgen.budget.registers` and `.warp_groups` list them,
`flashgen.budget.sram` adds them up.

Every rule there was read off the compiler: its intermediate code names each buffer and its place.
tests/compile/test_sram_sweep.py holds the sums to the compiler's figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.budget.elements import Elements, exchanged
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, Unit, widths
from flashgen.symbols import FloorDiv

#: What the parts of a phase are, in plain words.
MEANINGS = {
    "Q": "the query tile, read by every step of the loop",
    "K": "key tiles, one for each stage in flight",
    "V": "value tiles, one for each stage in flight",
    "K or V": "a tile of keys, then one of values (and P) in its place",
    "K copy or P": "a key tile in the layout that the unit reads, then P in its place",
    "V copy": "value tiles in the layout that the matrix unit reads",
    "elements": "elements of tensors that are read ahead, for each stage in flight",
    "P": "the softmax weights on their way from one product's layout to the other's",
    "K tile": "the keys whose gradients a program computes",
    "K tiles": "the keys whose gradients a program computes, and the next ones",
    "V tiles": "tiles of values, as many as fit beside the rest",
    "V tile": "the values whose gradients a program computes",
    "Q tile": "the queries whose gradient a program computes",
    "Q tiles": "query tiles, some for each stage in flight",
    "dO tile": "the gradient of the output for the query tile",
    "dO tiles": "tiles of the output's gradient, some for each stage in flight",
    "tile": "the tile on its way to registers",
    "factors": "what gradients of weights are multiplied by, from one consumer to the other",
    "dS tiles": "gradients of two tiles of scores, on their way to a product for the queries'",
    "dQ tiles": "what a tile of keys adds to the queries' gradients, then its own, on the way out",
    "P or dS": "weights, then their gradients, on their way from one product's layout to another's",
    "LSE, delta": "two numbers for each query of the tiles that are read ahead",
    "pieces": "a tile that changes from the layout of its load to a product's, piece by piece",
    "barriers": "8 bytes for each copy or product that a warp waits for",
    "scratch": "values that change threads between two layouts",
    "alignment": "bytes skipped before a query tile, which the hardware wants aligned",
    "captures": "what the partitions of a block are handed, and a byte for each of their warps",
    "tiles handed over": "what the producer found out of the present tile and the next",
    "hidden values": "which tiles of values have rows that the mask hides from every query",
    "growth": "votes of rows, and which tiles of queries outgrew their maxima",
    "output": "a tile of the output on its way to rows that a warp can store at once",
}


#: Phases without scores.
_BESIDE_WEIGHTS = ("read Q", "read tiles", "output")


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
        elements: those of tensors that the loop reads.
        as_output: a tile of scores has the shape of an output tile.
        sigmoid: weights are sigmoids of the scores.
        scored: something is computed of the scores, or loaded, before they become weights.
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


@dataclass(frozen=True)
class Phase:
    """Buffers that are alive together: names of `MEANINGS`, and bytes."""

    name: str
    parts: tuple[tuple[str, Any], ...]

    @property
    def total(self) -> Any:
        """Bytes of all parts."""
        return sympy.Add(*(size for _, size in self.parts))


class Tiles:
    """Bytes of one tile of each segment, and of what elements of tensors need.

    Attributes:
        q, k, v, out: a list with a size for each segment.
        p: of the softmax weights.
        rows: of a float32 for each query.
        elements: of what is copied ahead.
        before, after: of what is exchanged before the first product, and after it.
        exchanged: of both, one after the other.
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


def with_weights(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases of a kernel whose scores are not of products of q and k, but of positions alone.

    Such weights do not lie as a product's results do, and pass through shared memory to the next
    product. What q and k need stays counted: the compiler leaves it out.
    """
    p = ("P", BLOCK_M * BLOCK_N * ITEMSIZE)
    return tuple(
        phase
        if phase.name in _BESIDE_WEIGHTS
        else replace(phase, parts=(*(part for part in phase.parts if part[0] != "P"), p))
        for phase in phases
    )


def barrier_arrays(arrays: int, length: Any) -> Any:
    """Arrays of 8-byte barriers, each starting at a multiple of 16."""
    return (arrays - 1) * round_up(8 * length, 16) + 8 * length


def round_up(size: Any, multiple: Any) -> Any:
    """The next multiple."""
    return multiple * FloorDiv(size + multiple - 1, multiple)
