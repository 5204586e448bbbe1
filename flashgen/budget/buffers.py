"""What a block holds in shared memory: the parts that buffers are made of, as sympy expressions.

Triton gives buffers that are alive together places of their own, so a block asks for the largest
sum over the kernel's phases: reading Q, the loop over the keys, writing the output. Which buffers
a phase has depends on the matrix unit that computes the tiles, on how tiles are copied, and on
whether the loop is software-pipelined: each kernel's folder lists them.

Every rule there was read off the compiler: its intermediate code names each buffer and its place.
tests/compile holds the sums to the compiler's figure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy

from flashgen.budget.matrix_units import Unit
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE
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
    "matrix": "the matrix of random features",
    "pieces": "a tile that changes from the layout of its load to a product's, piece by piece",
    "barriers": "8 bytes for each copy or product that a warp waits for",
    "scratch": "values that change threads between two layouts",
    "alignment": "bytes skipped before tiles, which the hardware wants aligned",
    "captures": "what the partitions of a block are handed, and a byte for each of their warps",
    "tiles handed over": "what the producer found out of the present tile and the next",
    "hidden values": "which tiles of values have rows that the mask hides from every query",
    "hidden keys": "which tiles of keys have rows that the mask hides from every query",
    "hidden queries": "which tiles of queries have rows that see no key",
    "growth": "votes of rows, and which tiles of queries overflowed",
    "page rows": "the places of keys in their pages, on their way to the threads that load them",
    "conditions": "which scores of a tile a loaded element shows",
    "state": "a state on its way from the layout of its load to that of a product",
    "exponents": "the largest exponent of each key's random features, for each stage in flight",
    "features": "features of a chunk's queries and keys, which products read",
    "output": "a tile of the output on its way to rows that a warp can store at once",
}


#: Phases without scores.
_BESIDE_WEIGHTS = ("read Q", "read tiles", "output")

_BETWEEN_LOOPS = 1024  # bytes of what two loops leave unused: the largest alignment of a tile


@dataclass(frozen=True)
class Phase:
    """Buffers that are alive at the same time: names of `MEANINGS`, and bytes."""

    name: str
    parts: tuple[tuple[str, Any], ...]

    @property
    def total(self) -> Any:
        """Bytes of all parts."""
        return sympy.Add(*(size for _, size in self.parts))


def with_weights(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases of a kernel whose scores are not of products of q and k, but of positions alone.

    Such weights do not have the layout of a product's result, and pass through shared memory to the
    next product. Buffers of q and k are still counted, although the compiler omits them.
    """
    p = ("P", BLOCK_M * BLOCK_N * ITEMSIZE)
    return tuple(
        phase
        if phase.name in _BESIDE_WEIGHTS
        else replace(phase, parts=(*(part for part in phase.parts if part[0] != "P"), p))
        for phase in phases
    )


def in_two_loops(phases: tuple[Phase, ...], unit: Unit) -> tuple[Phase, ...]:
    """The phases of a kernel whose pipelined loop comes twice: without the mask, then with it.

    Each of the loops has buffers of its own, in the place of the other's. Triton places them one by
    one: a tile of the one that does not begin where one of the other does leaves bytes unused. The
    compiler left up to 992 in 800 kernels; only units that read tiles in place want them aligned.
    """
    if unit not in ("wgmma", "tcgen05"):
        return phases
    skipped = ("alignment", sympy.Integer(_BETWEEN_LOOPS))
    return tuple(
        replace(phase, parts=(*phase.parts, skipped)) if phase.name == "loop" else phase
        for phase in phases
    )


def barrier_arrays(arrays: int, length: Any) -> Any:
    """Arrays of 8-byte barriers, each starting at a multiple of 16."""
    return (arrays - 1) * round_up(8 * length, 16) + 8 * length


def round_up(size: Any, multiple: Any) -> Any:
    """The next multiple."""
    return multiple * FloorDiv(size + multiple - 1, multiple)
