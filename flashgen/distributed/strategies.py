"""Strategies by their names."""

from __future__ import annotations

from dataclasses import replace

from flashgen.distributed.costs import Choice
from flashgen.distributed.gather import Gather
from flashgen.distributed.heads import Heads
from flashgen.distributed.passes import Strategy
from flashgen.distributed.plan import with_every_row
from flashgen.distributed.ring import Ring
from flashgen.distributed.rows import Rows
from flashgen.distributed.work import Work


def made(choice: Choice, work: Work, keep: bool) -> Strategy:
    """What computes a call by a chosen strategy.

    Args:
        choice: the strategy, and its number of groups of heads.
        work: the call.
        keep: whether rows of others are kept for the backward pass.
    """
    if choice.strategy == "ulysses":
        return Heads(work)
    if choice.strategy == "ring":
        return Ring(work)
    if choice.strategy == "all-gather":
        exchange = work.exchange
        every = Gather(with_every_row(exchange.plan), exchange.rank, exchange.group)
        work = replace(work, exchange=every)
    return Rows(work, choice.cost.parts, keep)
