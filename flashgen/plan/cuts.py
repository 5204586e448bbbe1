"""query_cuts: whether tiles of queries start where segments begin, not at multiples of BLOCK_M.

A row table of a sorted tensor in itself says where the segment of each row begins: a document of a
packed sequence. A tile of queries that holds rows of two segments visits the keys of both, and half
of what it computes is hidden. The kernel for Hopper, which takes tiles one after another, can take
them from a list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import BATCH, KV_LEN, Q_FIRST, Q_LEN, B, Load


@dataclass(frozen=True)
class QueryCuts:
    """What tiles of queries are cut by.

    Attributes:
        table: where the segment of each row begins.
        by_batch: whether batch entries have segments of their own.
    """

    table: RowTable
    by_batch: bool


def query_cuts(bounds: TileBounds, tables: Iterable[RowTable]) -> QueryCuts | None:
    """The row table by which a tile's one run of keys begins no earlier than its first segment.

    It is None where there is no such table. Queries and keys are taken to have equal lengths.
    """
    if len(bounds.intervals) != 1:
        return None
    begin = bounds.intervals[0].begin
    limits = begin.args if isinstance(begin, sympy.Max) else (begin,)
    for table in tables:
        *lead, length = [None if dim is None else dim.sym for dim in table.keys.dims]
        if table.side != "left" or not table.of_itself or length not in (Q_LEN, KV_LEN):
            continue
        if lead == [] and Load(table.sym, Q_FIRST) in limits:
            return QueryCuts(table, by_batch=False)
        if lead == [BATCH] and Load(table.sym, B, Q_FIRST) in limits:
            return QueryCuts(table, by_batch=True)
    return None
