"""HopperShape and segment_table: the structure of the Gluon forward kernel for Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from flashgen.plan.kernel import KernelPlan
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import BATCH, KV_LEN, Q_FIRST, Q_LEN, B, Load

#: Head dimensions up to which the registers of three consumers hold scores of 128 keys beside the
#: output, and up to which they hold scores of 64 keys.
NARROW, WIDE = 64, 128

#: Columns of keys up to which shared memory holds the queries of two tiles, if the output takes
#: their place.
WIDEST_KEYS = 192


@dataclass(frozen=True)
class HopperShape:
    """The structure of the kernel for given head dimensions and visits.

    Attributes:
        halves: how many pieces the scores of a step are computed in, 1 or 2. Score function and
            mask of the first piece overlap the product of the second.
        q_in_registers: whether wgmma takes the queries from registers: their buffer is then free
            for the next tile's queries.
        q_stages: buffers for tiles of queries.
        k_extra: further buffers for tiles of keys, which are needed a step before their values.
        fused_kv_stages: whether a tile of keys and the previous tile's values, which one step
            multiplies, are one stage: a step waits once, and arrives once.
        ping_pong: whether consumers take turns with the matrix units.
        overlapped_tiles: whether a tile's first step overlaps the last step of the previous tile.
            Queries are then in registers, and consumers skip no tiles of keys.
        out_in_queries: whether the output is stored through the buffer of its tile's queries.
        splits: whether registers suffice for separate masked and unmasked steps.
    """

    halves: int
    q_in_registers: bool
    q_stages: int
    k_extra: int
    fused_kv_stages: bool
    ping_pong: bool
    overlapped_tiles: bool
    out_in_queries: bool
    splits: bool

    @property
    def loads_early(self) -> bool:
        """Whether there is a buffer for the next tile's queries while this tile is computed."""
        return self.q_in_registers or self.q_stages > 1

    @property
    def three_consumers(self) -> bool:
        """Whether a tile has rows for three consumers, each of which finishes it by itself."""
        return self.loads_early and not self.overlapped_tiles


#: Where scores of 128 keys fit beside the output in the registers of three consumers. Fused
#: K/V stages, which gain up to 3% elsewhere, lost 1% there.
_OF_NARROW = HopperShape(
    halves=1,
    q_in_registers=False,
    q_stages=2,
    k_extra=0,
    fused_kv_stages=False,
    ping_pong=True,
    overlapped_tiles=False,
    out_in_queries=False,
    splits=False,
)

#: Three consumers with scores of 64 keys. The output leaves through the buffer of its queries.
_THREE_CONSUMERS = replace(_OF_NARROW, fused_kv_stages=True, out_in_queries=True, splits=True)

#: The same where products last longer than a step's instructions take to be issued: two consumers
#: keep the matrix units busy while one ends its tile, so that none has to wait for its turn.
_WITHOUT_PING_PONG = replace(_THREE_CONSUMERS, ping_pong=False)

#: Two consumers with scores of 128 keys, for tiles of fewer rows.
_TWO_CONSUMERS = HopperShape(
    halves=2,
    q_in_registers=True,
    q_stages=1,
    k_extra=1,
    fused_kv_stages=False,
    ping_pong=True,
    overlapped_tiles=True,
    out_in_queries=False,
    splits=True,
)

#: Where neither registers nor shared memory hold anything of a second tile.
_OF_WIDEST = HopperShape(
    halves=1,
    q_in_registers=False,
    q_stages=1,
    k_extra=0,
    fused_kv_stages=True,
    ping_pong=True,
    overlapped_tiles=False,
    out_in_queries=False,
    splits=True,
)


def hopper_shape(plan: KernelPlan) -> HopperShape:
    """The structure for a plan."""
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    if max(qk, v) <= NARROW:
        return _OF_NARROW
    if plan.tiles.sorted and (plan.classifies or not plan.tiles.listed) and v <= WIDE:
        shape = _WITHOUT_PING_PONG if max(qk, v) >= WIDE else _THREE_CONSUMERS
        alike = plan.v_segments == plan.qk_segments[: len(plan.v_segments)]
        if alike and qk <= WIDEST_KEYS:
            return shape
        if qk <= WIDE:
            return replace(shape, out_in_queries=False)
    return _TWO_CONSUMERS if max(qk, v) <= WIDE else _OF_WIDEST


# Segment tiles: whether tiles of queries start where segments begin, not at multiples of BLOCK_M.
#
# A row table of a sorted tensor in itself says where the segment of each row begins: a document of
# a packed sequence. A tile of queries that holds rows of two segments visits the keys of both, and
# half of its scores are hidden. The kernel for Hopper, whose programs take one tile after another,
# can take them from a list.


def segment_table(plan: KernelPlan) -> RowTable | None:
    """The row table whose segments tiles of queries start at, in the kernel for Hopper.

    It bounds the one run of keys that a tile visits, and queries and keys have equal lengths.
    """
    if plan.listing or not plan.equal_lengths or len(plan.bounds.intervals) != 1:
        return None
    begin = plan.bounds.intervals[0].begin
    limits = begin.args if isinstance(begin, sympy.Max) else (begin,)
    for table in plan.row_tables:
        *lead, length = [None if dim is None else dim.sym for dim in table.keys.dims]
        entry = {(): (), (BATCH,): (B,)}.get(tuple(lead))  # segments of all entries, or of each
        if table.side != "left" or not table.of_itself or length not in (Q_LEN, KV_LEN):
            continue
        if entry is not None and Load(table.sym, *entry, Q_FIRST) in limits:
            return table
    return None


def tables_of_segments(plan: KernelPlan, table: RowTable) -> tuple[RowTable, ...]:
    """The row tables that the kernel which lists starts of tiles makes on the way.

    Those are `table`, whose segments it finds, and then the one that says whether its ids are in
    order.
    """
    flags = (t for t in plan.row_tables if (*t.search, t.side) == (*table.search, "unordered"))
    return (table, *flags)
