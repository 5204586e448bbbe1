"""Sequences of segments, and where tiles of queries start in them, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from flashgen import (
    AttentionSpec,
    Int,
    Tensor,
    alibi,
    causal,
    document,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax_off_by_one,
)

_SHARED = Tensor("ids", ("kv_len",), "int32", sorted=True)

#: Variants whose tiles of queries start where segments begin.
CUT = {
    "causal": AttentionSpec(128, mask=document() & causal()),
    "both_ways": AttentionSpec(128, mask=document()),
    "window": AttentionSpec(128, mask=document() & sliding_window(Int("width", 100, min=0), 0)),
    "alike_in_all_entries": AttentionSpec(64, mask=document(_SHARED) & causal()),
    "biased": AttentionSpec(64, "float16", mask=document() & causal(), score=alibi(8)),
    "sigmoid": AttentionSpec(80, mask=document() & causal(), normaliser=sigmoid_attention()),
    "capped": AttentionSpec(
        256, mask=document() & causal(), score=softcap(5.0), normaliser=softmax_off_by_one()
    ),
    "two_head_dims": AttentionSpec((192, 128), mask=document() & causal()),
}


def ids_of(lengths: Sequence[int], batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """(batch, length) ids of segments of these lengths, in another order in each batch entry."""
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for _ in range(batch):
        order = torch.randint(len(lengths), (length,), generator=generator)  # enough of them
        repeats = torch.tensor(lengths)[order]
        ids = torch.repeat_interleave(torch.arange(length, dtype=torch.int32), repeats)
        entries.append(3 * ids[:length] - 7)
    return torch.stack(entries)


def begins(ids: list[int]) -> list[int]:
    """Of each row the first one with the same id."""
    first = {value: row for row, value in reversed(list(enumerate(ids)))}
    return [first[value] for value in ids]


def tile_starts(ids: list[int], block_m: int) -> list[int]:
    """The rows of one batch entry at which tiles of queries start."""
    begin, counts = begins(ids), Counter(ids)
    own = [_starts_tiles(counts[value], block_m) for value in ids]
    return [
        row
        for row in range(len(ids))
        if (own[row] and row - begin[row] in _own_starts(counts[ids[row]], block_m))
        or (not own[row] and (row % block_m == 0 or own[row - 1]))
    ]


def _starts_tiles(rows: int, block_m: int) -> bool:
    tiles = -(-rows // block_m)
    return tiles > 1 and 5 * (tiles * block_m - rows) < 2 * tiles * block_m


def _own_starts(rows: int, block_m: int) -> set[int]:
    """Where the tiles of a segment that has its own start: the first is the short one."""
    rest = rows % block_m
    starts = {0, *range(rest + block_m, rows, block_m)}
    if rest:
        starts.add(rest + 64 if rest <= block_m - 128 else rest)
    return starts
