"""Bits of tiles and lists of tiles, beside the elements that are visible."""

from __future__ import annotations

from types import ModuleType

import torch

#: The rows and keys of a tile that kernels decide.
TILE = 64


def tiles_of(visible: torch.Tensor, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lists, tiles of queries, tiles of keys): whether some are visible, and whether all are.

    As far as tiles of 64 tell, each of which a tile of so many rows and keys touches.
    """
    visible = visible.flatten(0, 1)
    some, every = visible.clone(), visible.clone()
    for q in range(0, visible.shape[1], TILE):
        for kv in range(0, visible.shape[2], TILE):
            tile = (slice(None), slice(q, q + TILE), slice(kv, kv + TILE))
            some[tile] = visible[tile].flatten(1).any(1)[:, None, None]
            every[tile] = visible[tile].flatten(1).all(1)[:, None, None]

    def of_tiles(x: torch.Tensor) -> torch.Tensor:
        bands = [band.split(keys, 2) for band in x.split(rows, 1)]
        return torch.stack([torch.stack([t.amax((1, 2)) for t in band], 1) for band in bands], 1)

    return of_tiles(some), ~of_tiles(~every)


def check_bits(words: torch.Tensor, visible: torch.Tensor) -> None:
    """The bits of `_classify_tiles` say of each tile what its elements do.

    Args:
        words: (lists, tiles of queries, words of 32 tiles of keys, 2) int32.
        visible: bool (batch, heads, queries, keys), with an entry for each list.
    """
    some, every = tiles_of(visible, TILE, TILE)
    tile = torch.arange(some.shape[2])
    for number, expected in enumerate((some, every)):
        found = words[:, :, tile // 32, number] >> tile % 32 & 1
        assert torch.equal(found.bool(), expected), ("seen", "full")[number]


def check_lists(
    module: ModuleType, q: torch.Tensor, bits: torch.Tensor, visible: torch.Tensor, *sizes: int
) -> None:
    """The lists of both directions, for kernels of so many queries and keys a tile."""
    q_len, kv_len = visible.shape[2:]
    block_m, block_n = sizes
    some, every = tiles_of(visible, block_m, block_n)
    every[:, :, -1] &= kv_len % block_n == 0
    for turned in (False, True):
        lists = (module._turned if turned else module._listed)(
            q, kv_len, block_m, block_n, bits
        ).tolist()
        if turned:
            every[:, -1] &= q_len % block_m == 0
            some, every = some.transpose(1, 2), every.transpose(1, 2)
        for row, of_some, of_every in zip(
            lists, some.flatten(0, 1), every.flatten(0, 1), strict=True
        ):
            full = [2 * i for i in range(len(of_some)) if of_every[i]]
            masked = [2 * i + 1 for i in range(len(of_some)) if of_some[i] and not of_every[i]]
            assert row[:2] == [len(full) + len(masked), len(full)]
            assert row[2 : 2 + row[0]] == full + masked
