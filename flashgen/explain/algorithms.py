"""The work of several ways to compute attention, for one forward call, as sympy expressions.

The textbook's steps from standard attention to FlashAttention, on one machine and for one problem:
the FLOPs of each, its reads and writes, and its tiles in the SRAM of an SM. Two levels of traffic
are separate, as in `flashgen.budget.traffic`: bytes that SMs read and write, and those of them that
reach DRAM. Data that another tile reads again comes from L2 if L2 holds it.

Everything in SRAM and everything that is stored has `itemsize` bytes, but for the statistics of the
rows, which are float32. With an itemsize of 1 the same expressions count elements, which is how
textbooks measure. None of these skips a part of the mask, but for FlashAttention-1's loop order,
which is given the tiles that this kernel visits, so that the two differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE
from flashgen.budget.traffic import QK_HEAD_DIM as D
from flashgen.budget.traffic import TILES
from flashgen.budget.traffic import V_HEAD_DIM as V
from flashgen.symbols import KV_LEN, Q_LEN, FloorDiv, evaluate

#: Query heads and key heads of all batch entries, the side of a square tile, and the most blocks
#: that read the same data at the same time.
HEADS, KEY_HEADS, SIDE, SHARERS, SMS = sympy.symbols(
    "heads key_heads side sharers num_sms", integer=True, positive=True
)

#: Whether there is a mask, a score function and dropout, 1 or 0: for each of them standard
#: attention reads and writes all scores, and dropout stores which it keeps, a byte for each score.
MASKS, SCORES, DROPS = sympy.symbols("masks scores drops", integer=True, nonnegative=True)

#: The number of times that standard attention reads all scores, and writes them.
_PASSES = 2 + MASKS + SCORES + DROPS

_ALL = HEADS * Q_LEN * KV_LEN
_Q, _OUT = HEADS * Q_LEN * D * ITEMSIZE, HEADS * Q_LEN * V * ITEMSIZE
_KEYS = HEADS * KV_LEN * (D + V) * ITEMSIZE
_KEYS_ONCE = KEY_HEADS * KV_LEN * (D + V) * ITEMSIZE
_PRODUCTS = 2 * _ALL * (D + V)
_ZERO, _ONE = sympy.Integer(0), sympy.Integer(1)

# Two float32 numbers of a row: its maximum and the sum of its weights.
_STATISTICS = 8

_ROW_TILES = FloorDiv(Q_LEN + SIDE - 1, SIDE)

# Rows of all visited tiles.
_VISITED_ROWS = TILES * BLOCK_M
_ROWS = HEADS * Q_LEN


@dataclass(frozen=True)
class Flow:
    """Bytes that SMs read, or write.

    Attributes:
        streamed: bytes that pass DRAM whatever the caches hold.
        again: bytes that several tiles read, with all reads counted.
        once: the same bytes, counted once.
    """

    streamed: Any
    again: Any = _ZERO
    once: Any = _ZERO

    @property
    def of_sms(self) -> Any:
        """Bytes between the SMs and L2."""
        return self.streamed + self.again

    def of_dram(self, held: bool) -> Any:
        """Bytes between L2 and DRAM; ``held``: whether L2 holds the data that is read again."""
        return self.streamed + (self.once if held else _most(self.once, self.again))


@lru_cache(maxsize=1024)  # sympy is slow to compare them
def _most(once: Any, again: Any) -> Any:
    """Bytes of repeated reads that L2 does not hold."""
    return sympy.Max(once, FloorDiv(again, SHARERS))


@dataclass(frozen=True)
class Algorithm:
    """One way to compute attention.

    Attributes:
        name: its name.
        said: what it does with the scores.
        flops: FLOPs of its products.
        exponentials: exponentials of its softmax.
        read, written: bytes that SMs read and write.
        sram: bytes that a block holds at once, over the side of a square tile, or the blocks.
        sharers: the most blocks that read the same data at the same time.
        held: bytes that L2 has to hold so that repeated reads come from L2.
    """

    name: str
    said: str
    flops: Any
    exponentials: Any
    read: Flow
    written: Flow
    sram: Any
    sharers: Any = _ONE
    held: Any = _ZERO


STANDARD = Algorithm(
    "standard",
    "S and P through HBM: a kernel for each product, and for each step of the softmax",
    _PRODUCTS,
    _ALL,
    Flow(_Q + _KEYS + _PASSES * _ALL * ITEMSIZE),
    Flow(_OUT + _PASSES * _ALL * ITEMSIZE + DROPS * _ALL),
    _ZERO,
)

ONE_D = Algorithm(
    "1D tiling",
    "K and V whole in SRAM, beside some rows of scores",
    _PRODUCTS,
    _ALL,
    Flow(_Q + _KEYS),
    Flow(_OUT),
    (KV_LEN * (D + V) + SIDE * (D + V) + SIDE * KV_LEN) * ITEMSIZE,
)

# Scores: tiles of Q, K and S. Output: tiles of P and V, the accumulator, the new product.
TWO_D = Algorithm(
    "2D tiling",
    "tiles of S and P, without online softmax: whole rows are needed, through HBM",
    _PRODUCTS,
    _ALL,
    Flow(_Q + 2 * _ALL * ITEMSIZE, _ROW_TILES * _KEYS, _KEYS_ONCE),
    Flow(_OUT + 2 * _ALL * ITEMSIZE),
    (SIDE**2 + SIDE * sympy.Max(2 * D, 3 * V)) * ITEMSIZE,
    sympy.Min(_ROW_TILES, SMS),
    KV_LEN * (D + V) * ITEMSIZE,
)

ONLINE = Algorithm(
    "online softmax",
    "FlashAttention-2's order in the largest square tiles, no tile skipped",
    _PRODUCTS,
    _ALL + _ROWS * FloorDiv(KV_LEN + SIDE - 1, SIDE),
    Flow(_Q, _ROW_TILES * _KEYS, _KEYS_ONCE),
    Flow(_OUT),
    # Tiles of Q, K, V and the output, of S and of P.
    (2 * SIDE**2 + 2 * SIDE * (D + V)) * ITEMSIZE,
    sympy.Min(_ROW_TILES, SMS),
    KV_LEN * (D + V) * ITEMSIZE,
)

#: The most that `ONLINE` holds at once: K's tile is released before the weights are computed.
ONLINE_PEAK = (2 * SIDE**2 + SIDE * (D + 2 * V) + 3 * SIDE) * ITEMSIZE

#: Tiles of Q, K and V of FlashAttention-1, as textbooks count them, and its tile of scores.
FLASH_1_TILES = (BLOCK_M * D + BLOCK_N * (D + V)) * ITEMSIZE
FLASH_1_SCORES = BLOCK_M * BLOCK_N * ITEMSIZE

# For each tile of keys: the queries, their partial output and its statistics. The first tile has
# no partial output to read.
FLASH_1 = Algorithm(
    "FlashAttention-1",
    "its loop order, over this kernel's tiles: keys outside, output read and written again",
    2 * TILES * BLOCK_M * BLOCK_N * (D + V),
    TILES * BLOCK_M * (BLOCK_N + 2),
    Flow(
        _KEYS,
        _VISITED_ROWS * D * ITEMSIZE
        + sympy.Max(0, _VISITED_ROWS - _ROWS) * (V * ITEMSIZE + _STATISTICS),
        _Q,
    ),
    Flow(_ZERO, _VISITED_ROWS * (V * ITEMSIZE + _STATISTICS), _OUT + _ROWS * _STATISTICS),
    FLASH_1_TILES + FLASH_1_SCORES,
    held=sympy.Min(HEADS, SMS) * Q_LEN * (D + V) * ITEMSIZE,  # one head on each SM
)

#: In the order of the textbook.
ALGORITHMS = (STANDARD, ONE_D, TWO_D, ONLINE, FLASH_1)


def largest_side(sram: Any, capacity: int, values: Mapping[str, int]) -> int:
    """The side of the largest square tile whose SRAM is no more than the capacity; 0 for none.

    Args:
        sram: bytes over `SIDE` and the symbols of ``values``, growing with the side.
        capacity: bytes.
        values: the number behind every other symbol.
    """

    def fits(side: int) -> bool:
        return bool(evaluate(sram, {**values, SIDE.name: side}) <= capacity)

    above = 1
    while fits(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
