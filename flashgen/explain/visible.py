"""visible_share: the share of a head's elements that the mask shows, counted without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.budget.traffic import Workload
from flashgen.explain.numbers import python_function
from flashgen.explain.picture import MASKED, UNMASKED, Picture
from flashgen.plan import KernelPlan
from flashgen.plan.visible_pairs import of_one_row
from flashgen.symbols import KV_IDX, Q_IDX

#: The number of elements for which the mask is evaluated one by one: a second or two.
MOST_ELEMENTS = 2**20


@dataclass(frozen=True)
class Share:
    """The visible share of a head's elements.

    Attributes:
        share: from 0 to 1.
        rows_counted: the queries whose keys were counted; None for all.
    """

    share: float
    rows_counted: int | None


def visible_share(plan: KernelPlan, work: Workload, tiles: Picture) -> Share:
    """The visible share of the first head of the first sequence, which the picture shows.

    A tile of one query mostly sees each key that it visits: then its bounds give their number. For
    other queries the mask itself is evaluated, for the elements of masked tiles: for all queries,
    or for queries at equal distances.
    """
    values = {**dict(work.params), "q_len": work.q_len, "kv_len": work.kv_len, "b": 0, "h": 0}
    values |= {"num_q_heads": work.num_q_heads, "num_kv_heads": work.num_kv_heads}
    runs = [
        python_function((Q_IDX,), map(of_one_row, run.expressions), values)
        for run in plan.bounds.intervals
    ]
    [sees] = [python_function((Q_IDX, KV_IDX), (plan.predicate.expr,), values)]
    counted: int = 0
    unsure: list[int] = []
    for q_idx in range(work.q_len):
        visited = _union(
            (begin, end, (begin, end) == (full_begin, full_end))
            for run in runs
            for begin, end, full_begin, full_end, holds in [run(q_idx)]
            if holds and begin < end
        )
        if all(full for _, _, full in visited):
            counted += sum(end - begin for begin, end, _ in visited)
        else:
            unsure.append(q_idx)
    rows = [tiles.rows[q_idx // tiles.block_m] for q_idx in unsure]
    step = -(-sum(row.count(MASKED) for row in rows) * tiles.block_n // MOST_ELEMENTS) or 1
    found = 0
    for q_idx, row in list(zip(unsure, rows, strict=True))[::step]:
        found += tiles.block_n * row.count(UNMASKED)
        for cell, kind in enumerate(row):
            if kind == MASKED:
                first = tiles.block_n * cell
                keys = range(first, min(first + tiles.block_n, work.kv_len))
                found += sum(bool(sees(q_idx, kv_idx)[0]) for kv_idx in keys)
    asked = len(unsure[::step])
    seen = counted + (found * len(unsure) / asked if asked else 0)
    counted_rows = None if step == 1 else work.q_len - len(unsure) + asked
    return Share(seen / (work.q_len * work.kv_len), counted_rows)


def _union(
    runs: Iterable[tuple[int, int, bool]],
) -> list[tuple[int, int, bool]]:
    """Runs of keys in order, without keys of earlier runs."""
    done, apart = 0, []
    for begin, end, full in sorted(runs):
        if end > max(begin, done):
            apart.append((max(begin, done), end, full))
            done = end
    return apart
