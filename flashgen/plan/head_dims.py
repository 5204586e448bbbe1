"""Head dimensions as Triton computes them: in segments whose widths are powers of two."""

from __future__ import annotations

from dataclasses import dataclass

# The matrix units read at least 16 columns of an operand at a time.
SMALLEST_SEGMENT = 16


@dataclass(frozen=True)
class Segment:
    """A power-of-two run of a head's columns: Triton's tiles have power-of-two sides.

    Attributes:
        start: first column.
        width: columns of the tile, a power of two.
        suffix: what tells its variables apart: ``""`` where a head is one segment, else ``"_0"``...
    """

    start: int
    width: int
    suffix: str


def split_head_dim(head_dim: int) -> tuple[Segment, ...]:
    """Powers of two that add up to the head dimension, largest first, the last at least 16 wide.

    192 is 128 + 64, where padding to a power of two would compute 256 columns; 72 is 64 + 16, of
    which the last 8 are padding.
    """
    padded = -(-head_dim // SMALLEST_SEGMENT) * SMALLEST_SEGMENT
    widths = [1 << bit for bit in reversed(range(padded.bit_length())) if padded >> bit & 1]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    suffixes = [f"_{i}" if len(widths) > 1 else "" for i in range(len(widths))]
    return tuple(map(Segment, starts, widths, suffixes))
