"""The two questions that bounds answer: keys of a tile of rows, and rows of a tile of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.symbols import KV_FIRST, KV_IDX, KV_LAST, KV_LEN, Q_FIRST, Q_IDX, Q_LAST, Q_LEN


@dataclass(frozen=True)
class Roles:
    """Which position runs over a tile and which one is solved for.

    Attributes:
        tile: the position inside the tile, between `first` and `last`, below `tile_len`.
        solved: the position whose intervals are derived, below `solved_len`.
    """

    tile: Any
    first: Any
    last: Any
    tile_len: Any
    solved: Any
    solved_len: Any

    def holds_tile(self, expr: Any) -> bool:
        """Whether ``expr`` differs from row to row of the tile."""
        return self.tile in expr.free_symbols

    def holds_solved(self, expr: Any) -> bool:
        """Whether ``expr`` depends on the position that is solved for."""
        return self.solved in expr.free_symbols


#: The keys that a tile of rows visits: what a forward kernel loops over.
KEYS_OF_ROWS = Roles(Q_IDX, Q_FIRST, Q_LAST, Q_LEN, KV_IDX, KV_LEN)

#: The rows that visit a tile of keys: what a backward kernel loops over.
ROWS_OF_KEYS = Roles(KV_IDX, KV_FIRST, KV_LAST, KV_LEN, Q_IDX, Q_LEN)


_OF_TILES = frozenset((Q_FIRST, Q_IDX, Q_LAST, KV_FIRST, KV_IDX, KV_LAST))


def is_of_tile(expr: Any) -> bool:
    """Whether ``expr`` depends on a position: on more than batch entry, head and numbers."""
    return not _OF_TILES.isdisjoint(expr.free_symbols)
