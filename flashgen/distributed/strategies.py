"""Strategies by their names."""

from __future__ import annotations

from dataclasses import replace

from flashgen.distributed.costs import Choice, Sizes
from flashgen.distributed.gather import Gather
from flashgen.distributed.grid import Grid
from flashgen.distributed.heads import Heads
from flashgen.distributed.passes import Strategy
from flashgen.distributed.plan import with_every_row
from flashgen.distributed.ring import Ring
from flashgen.distributed.rows import Rows
from flashgen.distributed.work import Work


def made(choice: Choice, work: Work, sizes: Sizes) -> Strategy:
    """What computes a call by a chosen strategy.

    Args:
        choice: the strategy, and how it goes about.
        work: the call.
        sizes: of the call.
    """
    cost = choice.cost
    if choice.strategy == "ulysses":
        return Heads(work)
    if choice.strategy == "ring":
        return Ring(work)
    if choice.strategy == "all-gather":
        exchange = work.exchange
        every = Gather(with_every_row(exchange.plan), exchange.rank, exchange.group)
        work = replace(work, exchange=every)
    if choice.strategy == "grid":
        heads = sizes.num_q_heads, sizes.num_kv_heads
        return Grid(work, heads, cost.size, cost.parts, cost.keep)
    return Rows(work, cost.parts, cost.keep)
