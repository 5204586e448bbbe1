"""Shares: how the cache kernel's programs share out the keys of a call.

The arithmetic of `_launch_cache` and of `_cache_attention` for sequences of equal lengths, on which
`flashgen explain` tells of it. A test compares it with the parts that the kernel writes.
"""

from __future__ import annotations

from dataclasses import dataclass

#: `LEAST_SHARES` of a module.
LEAST_SHARES = 2

#: Shares of a unit at most, and of all units of a head of keys.
MOST_OF_A_UNIT, MOST_OF_ALL = 2**15, 2**30


@dataclass(frozen=True)
class Shares:
    """How a call is shared out.

    Attributes:
        programs: how many are launched.
        busy: how many of them have keys to read.
        teams: the programs of a head of keys.
        units: of a head of keys: its tiles of queries, of all sequences.
        of_a_unit: the shares of each.
        of_a_program: the most shares of one program.
        parts: for each unit, the number of programs that compute it.
    """

    programs: int
    busy: int
    teams: int
    units: int
    of_a_unit: int
    of_a_program: int
    parts: tuple[int, ...]

    @property
    def merged(self) -> tuple[int, ...]:
        """The units that several programs compute."""
        return tuple(unit for unit, parts in enumerate(self.parts) if parts > 1)


def share_out(
    *,
    batch: int,
    kv_heads: int,
    tiles: int,
    visits: int,
    capacity_tiles: int,
    at_once: int,
    num_splits: int | None = None,
) -> Shares:
    """The shares of a call.

    Args:
        batch: sequences.
        kv_heads: heads of keys.
        tiles: of queries, for a sequence and a head of keys.
        visits: tiles of keys by which a tile of queries counts.
        capacity_tiles: the tiles of keys that the cache may hold of a sequence.
        at_once: programs that the GPU runs side by side.
        num_splits: as of `cache_attention`.
    """
    units = batch * tiles
    teams = max(1, at_once // kv_heads) if num_splits is None else num_splits * units
    of_a_share = max(
        1, -(-capacity_tiles // MOST_OF_A_UNIT), -(-capacity_tiles * units // MOST_OF_ALL)
    )
    of_a_unit = max(1, -(-visits // of_a_share))
    least = LEAST_SHARES if num_splits is None else 1
    of_a_program = max(-(-units * of_a_unit // teams), least)
    parts = tuple(
        (unit * of_a_unit + of_a_unit - 1) // of_a_program - unit * of_a_unit // of_a_program + 1
        for unit in range(units)
    )
    return Shares(
        programs=teams * kv_heads,
        busy=-(-units * of_a_unit // of_a_program) * kv_heads,
        teams=teams,
        units=units,
        of_a_unit=of_a_unit,
        of_a_program=of_a_program,
        parts=parts,
    )
