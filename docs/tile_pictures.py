"""Pictures of a mask: what is visible, over the tiles that the derived bounds skip, mask or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import torch

from flashgen.constants import Constant
from flashgen.masks import Mask
from flashgen.reference import visibility
from flashgen.symbolic import RowTable, TileBounds
from flashgen.symbolic.tile_logic import TileLogic
from flashgen.symbols import evaluate

Values = Mapping[str, Any]

#: Rows and columns of a tile in the pictures.
BLOCK = 8

#: Colours that show on a white page and on a black one.
COLOURS = {
    "skipped": "#8883",
    "masked": "#e8a33d",
    "for nothing": "#d9655f",
    "unmasked": "#4aa3df",
}


@dataclass(frozen=True)
class Picture:
    """One head's queries (down) and keys (across), and what the kernel does with each tile.

    Attributes:
        seen: (q_len, kv_len), whether a query sees a key: the mask's own function, on tensors.
        tiles: (row, column) of a tile -> a key of `COLOURS`.
    """

    seen: torch.Tensor
    tiles: Mapping[tuple[int, int], str]

    @property
    def counts(self) -> Counter[str]:
        """How many tiles there are of each kind."""
        return Counter(self.tiles.values())


def picture(
    mask: Mask, derived: TileBounds | TileLogic, q_len: int, kv_len: int, values: Values
) -> Picture:
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
    by_bounds = isinstance(derived, TileBounds)
    tables = derived.tables if by_bounds else derived.row_tables
    visits = _by_bounds(derived) if by_bounds else _by_list(derived)
    numbers = {**_as_read(tables, values), "q_len": q_len, "kv_len": kv_len}
    tiles = {}
    for q_first in range(0, q_len, BLOCK):
        q_last = min(q_first + BLOCK, q_len) - 1
        at = {**numbers, "q_first": q_first, "q_last": q_last, "b": 0, "h": 0}
        visited, unmasked = visits(at)
        for kv_first in range(0, kv_len, BLOCK):
            tile, n = seen[q_first : q_last + 1, kv_first : kv_first + BLOCK], kv_first // BLOCK
            kind = "skipped"
            if n in visited:
                kind = "unmasked" if n in unmasked else "masked" if tile.any() else "for nothing"
            if (kind == "skipped" and tile.any()) or (kind == "unmasked" and not tile.all()):
                raise ValueError(f"{mask.label}: the tile at {q_first}, {kv_first} is {kind}")
            tiles[q_first // BLOCK, n] = kind
    return Picture(seen, tiles)


def _by_bounds(bounds: TileBounds) -> Callable[[Values], tuple[set[int], set[int]]]:
    """The tiles of keys that one tile of queries visits, and those that need no mask."""

    def visits(values: Values) -> tuple[set[int], set[int]]:
        visited: set[int] = set()
        unmasked: set[int] = set()
        for interval in bounds.intervals:
            begin, end, full_begin, full_end, holds = (
                evaluate(part, values) for part in interval.expressions
            )
            if holds and begin < end:
                visited.update(range(begin // BLOCK, -(-end // BLOCK)))
            unmasked.update(range(-(-full_begin // BLOCK), full_end // BLOCK))
        return visited, unmasked

    return visits


def _by_list(logic: TileLogic) -> Callable[[Values], tuple[set[int], set[int]]]:
    """The same, where a kernel lists the tiles by what block tables say of each."""

    def visits(values: Values) -> tuple[set[int], set[int]]:
        visited, unmasked = set(), set()
        for kv_first in range(0, values["kv_len"], BLOCK):
            kv_last = min(kv_first + BLOCK, values["kv_len"]) - 1
            known = {**values, "kv_first": kv_first, "kv_last": kv_last}
            for named in logic.tables:
                rows, columns = (
                    range(evaluate(first, known), evaluate(last, known) + 1)
                    for first, last in (named.table.rows, named.table.columns)
                )
                shown = [
                    evaluate(named.table.entry, {**known, "block_row": i, "block_column": j}) != 0
                    for i, j in product(rows, columns)
                ]
                known |= {named.some.name: any(shown), named.every.name: all(shown)}
            if evaluate(logic.seen, known):
                visited.add(kv_first // BLOCK)
            if evaluate(logic.full, known) and kv_first + BLOCK <= values["kv_len"]:
                unmasked.add(kv_first // BLOCK)
        return visited, unmasked

    return visits


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


def svg(shown: Picture, title: str) -> str:
    """The picture as a file of its own, legible on light and dark pages."""
    q_len, kv_len = shown.seen.shape
    left, top = 7, 7
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{4 * (kv_len + left + 1)}" '
        f'height="{4 * (q_len + top + 1)}" viewBox="{-left} {-top} {kv_len + left + 1} '
        f'{q_len + top + 1}" font-family="sans-serif" font-size="4.2" fill="#888">',
        f"<title>{title}</title>",
        '<text x="0" y="-2">keys</text>',
        '<text transform="translate(-2 0) rotate(-90)" text-anchor="end">queries</text>',
    ]
    for kind, colour in COLOURS.items():
        tiles = [tile for tile, is_kind in shown.tiles.items() if is_kind == kind]
        if tiles:
            outline = "".join(_rectangle(*_place(tile, q_len, kv_len)) for tile in tiles)
            lines.append(f'<path fill="{colour}" d="{outline}"/>')
    if runs := "".join(_rectangle(x, y, width, 1) for x, y, width in _runs(shown.seen)):
        lines.append(f'<path fill="#000" fill-opacity=".45" d="{runs}"/>')
    grid = "".join(
        [f"M0 {y}h{kv_len}" for y in (*range(0, q_len, BLOCK), q_len)]
        + [f"M{x} 0v{q_len}" for x in (*range(0, kv_len, BLOCK), kv_len)]
    )
    lines.append(f'<path stroke="#888" stroke-width=".2" d="{grid}"/>')
    return "\n".join([*lines, "</svg>", ""])


def _place(tile: tuple[int, int], q_len: int, kv_len: int) -> tuple[int, int, int, int]:
    """x, y, width and height of a tile."""
    y, x = (BLOCK * i for i in tile)
    return x, y, min(BLOCK, kv_len - x), min(BLOCK, q_len - y)


def _rectangle(x: int, y: int, width: int, height: int) -> str:
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _runs(seen: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """First key, query and number of each run of visible keys."""
    for y, row in enumerate(seen.tolist()):
        x = 0
        for visible, cells in groupby(row):
            width = len(list(cells))
            if visible:
                yield x, y, width
            x += width
