"""HopperShape: the structure of the Gluon forward kernel for Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.plan.kernel import KernelPlan

#: Head dimensions up to which scores of 128 keys fit beside the output in the registers of three
#: consumers, and up to which those of 64 keys do.
NARROW, WIDE = 64, 128

#: Columns of keys up to which shared memory holds the queries of two tiles, if the output takes
#: their place.
WIDEST_KEYS = 192


@dataclass(frozen=True)
class HopperShape:
    """The structure that the head dimensions and the length of a tile's work ask for.

    Attributes:
        halves: pieces that the scores of a step are computed in, 1 or 2. Score function
            and mask of the first run beside the product of the second.
        q_in_registers: whether wgmma takes the queries from registers: their buffer is then free
            for those of the next tile.
        q_stages: buffers for tiles of queries.
        k_extra: buffers for tiles of keys beyond those for values, which are needed a step later.
        paired: whether a tile of keys and the values of the one before, which one step multiplies,
            are loaded and passed on together: a step waits once, and arrives once.
        turns: whether one consumer after another has its products with the matrix units.
        flat: whether a tile's first step runs beside the last one of the tile before. Queries are
            then in registers, and consumers skip no tiles of keys.
        out_in_queries: whether the output passes through the buffer of its tile's queries.
        splits: whether there are registers for two kinds of steps.
    """

    halves: int
    q_in_registers: bool
    q_stages: int
    k_extra: int
    paired: bool
    turns: bool
    flat: bool
    out_in_queries: bool
    splits: bool

    @property
    def loads_early(self) -> bool:
        """Whether there is a buffer for the next tile's queries while this tile is computed."""
        return self.q_in_registers or self.q_stages > 1

    @property
    def long_tiles(self) -> bool:
        """Whether a tile has rows for three consumers, each of which ends it by itself."""
        return self.loads_early and not self.flat


#: Where scores of 128 keys fit beside the output in the registers of three consumers. Pairs, which
#: gain up to 3% elsewhere, lost 1% there.
_OF_NARROW = HopperShape(
    halves=1,
    q_in_registers=False,
    q_stages=2,
    k_extra=0,
    paired=False,
    turns=True,
    flat=False,
    out_in_queries=False,
    splits=False,
)

#: Three consumers with scores of 64 keys. The output leaves through the buffer of its queries.
_OF_LONG_TILES = replace(_OF_NARROW, paired=True, out_in_queries=True, splits=True)

#: The same where products last longer than a step's instructions take to be issued: two consumers
#: keep the matrix units busy while one ends its tile, so that none has to wait for its turn.
_OF_LONG_PRODUCTS = replace(_OF_LONG_TILES, turns=False)

#: Two consumers with scores of 128 keys, for tiles of fewer rows.
_OF_SHORT_TILES = HopperShape(
    halves=2,
    q_in_registers=True,
    q_stages=1,
    k_extra=1,
    paired=False,
    turns=True,
    flat=True,
    out_in_queries=False,
    splits=True,
)

#: Where neither registers nor shared memory hold anything of a second tile.
_OF_WIDEST = HopperShape(
    halves=1,
    q_in_registers=False,
    q_stages=1,
    k_extra=0,
    paired=True,
    turns=True,
    flat=False,
    out_in_queries=False,
    splits=True,
)


def hopper_shape(plan: KernelPlan) -> HopperShape:
    """The structure for a plan."""
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    if max(qk, v) <= NARROW:
        return _OF_NARROW
    if plan.tiles.sorted and not plan.tiles.listed and v <= WIDE:
        shape = _OF_LONG_PRODUCTS if max(qk, v) >= WIDE else _OF_LONG_TILES
        alike = plan.v_segments == plan.qk_segments[: len(plan.v_segments)]
        if alike and qk <= WIDEST_KEYS:
            return shape
        if qk <= WIDE:
            return replace(shape, out_in_queries=False)
    return _OF_SHORT_TILES if max(qk, v) <= WIDE else _OF_WIDEST
