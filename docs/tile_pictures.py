"""Pictures of a mask: what is visible, over the tiles that the derived bounds skip, mask or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.block_lists import BlockLists, table_of_lists
from flashgen.constants import Constant
from flashgen.explain.picture import FOR_NOTHING, MASKED, SKIPPED, UNMASKED, Picture, picture
from flashgen.masks import Mask
from flashgen.reference import visibility
from flashgen.symbolic import RowTable, TileBounds
from flashgen.symbolic.tile_logic import TileLogic

Values = Mapping[str, Any]

#: Rows and columns of a tile in the pictures.
BLOCK = 8


@dataclass(frozen=True)
class Checked:
    """A picture that the mask's own function, on tensors, agrees with.

    Attributes:
        tiles: what the kernel does with each tile.
        seen: (q_len, kv_len), whether a query sees a key.
    """

    tiles: Picture
    seen: torch.Tensor


def checked_picture(
    mask: Mask, derived: TileBounds | TileLogic, q_len: int, kv_len: int, values: Values
) -> Checked:
    """The first head of the first sequence, by the mask and by what was derived from it.

    Args:
        mask: what is seen.
        derived: the bounds of a loop, or the logic by which a kernel lists tiles.
        q_len: queries.
        kv_len: keys.
        values: of its parameters, tensors among them.

    Raises:
        ValueError: a tile that is skipped holds a visible key, or an unmasked one a hidden one.
    """
    seen = visibility(mask, 1, 1, q_len, kv_len, params=values)
    seen = seen.expand(1, 1, q_len, kv_len)[0, 0]
    values = {**values, **{c.name: c.tensor() for c in mask.params if isinstance(c, Constant)}}
    values |= {"num_q_heads": 1, "num_kv_heads": 1}
    values |= {x.name: _table(x, values, kv_len) for x in mask.params if isinstance(x, BlockLists)}
    tables = derived.tables if isinstance(derived, TileBounds) else derived.row_tables
    tiles = picture(derived, q_len, kv_len, BLOCK, BLOCK, _as_read(tables, values))
    rows = [list(row) for row in tiles.rows]
    for i, row in enumerate(rows):
        for j, kind in enumerate(row):
            tile = seen[BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)]
            if (kind == SKIPPED and tile.any()) or (kind == UNMASKED and not tile.all()):
                raise ValueError(f"{mask.label}: the tile at {BLOCK * i}, {BLOCK * j} is {kind!r}")
            if kind == MASKED and not tile.any():
                row[j] = FOR_NOTHING
    return Checked(replace(tiles, rows=tuple(map("".join, rows))), seen)


def _table(lists: BlockLists, values: Values, kv_len: int) -> torch.Tensor:
    """What kernels read in place of lists of blocks."""
    counts = None if lists.counts is None else values[lists.counts.name]
    return table_of_lists(values[lists.name], counts, -(-kv_len // lists.block))


class _Elements:
    """A tensor as the kernel reads it: 0 outside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, index: tuple[int, ...]) -> Any:
        inside = all(0 <= i < n for i, n in zip(index, self.tensor.shape, strict=True))
        return self.tensor[index].item() if inside else 0


def _as_read(tables: Iterable[RowTable], values: Values) -> dict[str, Any]:
    """The parameters, and the tables that the launcher makes of them, as kernels read them."""
    made = {
        t.name: torch.searchsorted(
            values[t.keys.name], values[t.values.name], right=t.side == "right"
        )
        for t in tables
    }
    return {
        name: _Elements(value) if isinstance(value, torch.Tensor) else value
        for name, value in {**values, **made}.items()
    }
