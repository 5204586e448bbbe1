"""cut_table: whether tiles of queries start where segments begin, not at multiples of BLOCK_M.

A row table of a sorted tensor in itself says where the segment of each row begins: a document of a
packed sequence. A tile of queries that holds rows of two segments visits the keys of both, and half
of what it computes is hidden. The kernel for Hopper, whose programs take one tile after another,
can take them from a list.
"""

from __future__ import annotations

import sympy

from flashgen.plan.kernel import KernelPlan
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import BATCH, KV_LEN, Q_FIRST, Q_LEN, B, Load


def cut_table(plan: KernelPlan) -> RowTable | None:
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


def cut_makes(plan: KernelPlan, table: RowTable) -> tuple[RowTable, ...]:
    """The row tables that the kernel which lists starts of tiles makes on the way.

    Those are `table`, which it cuts by, and then the one that says whether its ids are in order.
    """
    flags = (t for t in plan.row_tables if (*t.pair, t.side) == (*table.pair, "unordered"))
    return (table, *flags)
