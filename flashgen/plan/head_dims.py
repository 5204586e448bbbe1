"""Head dimensions as Triton computes them: in segments whose widths are powers of two; a plan's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.normalisers import Linear
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.spec import AttentionSpec

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


def halved(parts: tuple[Segment, ...]) -> tuple[tuple[int, int], ...]:
    """Segments with those of 128 columns in halves, as sums in memory have them."""
    return tuple(
        (start, min(part.width, 64))
        for part in parts
        for start in range(part.start, part.start + part.width, 64)
    )


class Heads:
    """What a plan's heads are in memory and in tiles; all of it follows from the spec.

    Attributes:
        spec: what the user declared.
    """

    spec: AttentionSpec

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query and key, as kernels read them: of products, where calls have
        a feature map's matrix multiply them first.
        """
        normaliser, head_dim = self.spec.normaliser, self.spec.qk_head_dim
        if isinstance(normaliser, Linear):
            return normaliser.feature_map.columns(head_dim)
        return head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of a head's value and output."""
        return self.spec.v_head_dim

    @cached_property
    def qk_parts(self) -> tuple[Segment, ...]:
        """The segments that the columns of q and k are read in."""
        return split_head_dim(self.qk_head_dim)

    @cached_property
    def v_parts(self) -> tuple[Segment, ...]:
        """The segments that the columns of v and of the output are computed in."""
        return split_head_dim(self.v_head_dim)

    @property
    def qk_segments(self) -> tuple[int, ...]:
        """Widths of `qk_parts`, the padding of the last one included."""
        return tuple(part.width for part in self.qk_parts)

    @property
    def v_segments(self) -> tuple[int, ...]:
        """Widths of `v_parts`, the padding of the last one included."""
        return tuple(part.width for part in self.v_parts)

    @property
    def qk_padded(self) -> bool:
        """Whether the last segment of q and k reaches past the head dimension."""
        return sum(self.qk_segments) > self.qk_head_dim

    @property
    def v_padded(self) -> bool:
        """Whether the last segment of v and of the output reaches past the head dimension."""
        return sum(self.v_segments) > self.v_head_dim

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return ITEMSIZES[self.spec.dtype]

    @property
    def mixes_widths(self) -> bool:
        """Whether tiles lie in shared memory in different ways: in rows of 32, 64 or 128 bytes."""
        widths = (*self.qk_segments, *self.v_segments)
        return len({min(width * self.itemsize, 128) for width in widths}) > 1
