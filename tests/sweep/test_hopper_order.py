"""The order in which the Gluon forward kernel hands out its tiles of queries."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from support.gluon.values import Block
from sweep.hopper import shipped

#: An H200's.
PROGRAMS = 132

#: (tiles of a head, heads, heads side by side): 16384 tokens by length, down to less than a tile
#: for each program.
CALLS = [(86, 16, 2), (43, 32, 4), (22, 64, 8), (11, 128, 16), (86, 8, 2), (3, 24, 8), (1, 40, 8)]


def order_of(tiles: int, heads: int, together: int) -> list[tuple[int, int]]:
    """(tile, head) of causal attention, as they are handed out."""
    index = Block(torch.arange(tiles * heads, dtype=torch.int32))
    call = SimpleNamespace(num_tiles_m=tiles, num_tiles=tiles * heads, heads_together=together)
    tile, head = shipped("causal_d128")._in_order(index, call)
    return list(zip(tile.data.tolist(), head.data.tolist(), strict=True))


def idle_share(costs: Iterable[int]) -> float:
    """What programs that take one after the other wait at the end, as a share of their work."""
    ends = [0] * PROGRAMS
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) * PROGRAMS / sum(ends) - 1


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_tile_once(call: tuple[int, int, int]) -> None:
    tiles, heads, _ = call
    order = order_of(*call)
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_groups_of_heads_first_and_the_shortest_last(call: tuple[int, int, int]) -> None:
    tiles, heads, together = call
    late = tiles // 4
    order = order_of(*call)
    early = (tiles - late) * heads
    assert {tile for tile, _ in order[early:]} == {*range(late)}
    group = (tiles - late) * together
    for start in range(0, early, group):
        of_group = order[start : start + group]
        assert len({head for _, head in of_group}) == together
    for part in (order[:group], order[early:]):
        assert [tile for tile, _ in part] == sorted((tile for tile, _ in part), reverse=True)


def test_programs_end_together() -> None:
    """Where groups of heads alone leave 3.6% of a causal call's time: two heads are few tiles."""
    tiles, heads, together = CALLS[0]
    costs = [5 + 3 * (tile + 1) for tile in range(tiles)]
    groups = [tile for _ in range(heads // together) for tile in reversed(range(tiles))]
    alone = idle_share(costs[tile] for tile in groups for _ in range(together))
    assert 0.03 < alone < 0.05
    assert idle_share(costs[tile] for tile, _ in order_of(tiles, heads, together)) < 0.01
