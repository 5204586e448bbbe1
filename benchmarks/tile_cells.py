"""The cells of benchmarks.tiles: masks that only the data knows, with their data.

The masks are those of specs/tiles_d128.py, here in plain torch, for FlexAttention and for the dense
reference. Cells come in the order of their importance: a run that is cut off has the first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.attentions import MaskMod, causal_mask
from flashgen.block_lists import table_of_lists

HEAD_DIM = 128
BLOCK = 64  # keys, and queries, of a block in a table or list
GATED, CHOSEN = 8, 16  # blocks of a row of the table, and of a list
FLAGS, NEAR = 16, 128  # queries and keys that see everything, and the window of the others
PICTURE, PICTURE_EVERY = 256, 1365  # tokens
DOCUMENTS, RUN = 6, 900  # documents, and the mean length of a part of one
PADDED = 5  # the last fifth of the keys
FIRST = 100  # keys of the dense mask that every query sees
ROW, SIDE, WINDOW = 16, 128, 13  # of tiles of 64 tokens; of the image, and its neighbourhood


@dataclass(frozen=True)
class TileCell:
    """A mask with the sizes of a call of one sequence.

    Attributes:
        mask: the name of its data, of `DATA`, and of its module without the head_dim.
        title: its name in tables.
        length: queries and keys.
        kv_heads: heads of keys, for 16 heads of queries.
        kind: which lists: ``"random"``, or ``"near"``, alike for neighbours.
        small: whether FlexAttention is also asked for blocks of `BLOCK`.
    """

    mask: str
    title: str
    length: int = 16384
    kv_heads: int = 16
    kind: str = ""
    small: bool = False

    heads = 16

    @property
    def module(self) -> str:
        """The module that computes it."""
        return f"{self.mask}_d{HEAD_DIM}"

    @property
    def name(self) -> str:
        """Its title with its sizes."""
        grouped = f", {self.heads}/{self.kv_heads} heads" if self.kv_heads < self.heads else ""
        return f"{self.title}, {self.length:,}{grouped}"

    @property
    def reference(self) -> str:
        """The name of the causal cell of the same sizes."""
        return TileCell("causal", "causal", self.length, self.kv_heads).name


@dataclass(frozen=True)
class Data:
    """What the calls of a cell read.

    Attributes:
        mask_mod: the mask in torch; h is a head of q.
        parameters: keywords of the module's functions.
        heads: how many heads have a mask of their own: 1, those of keys, or those of q.
        aux: the tensors that the function of `benchmarks.fa4_mods` of this mask reads.
    """

    mask_mod: MaskMod
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    heads: int = 1
    aux: tuple[torch.Tensor, ...] = ()


CELLS = (
    TileCell("causal", "causal"),
    TileCell("islands", "pictures in causal text"),
    TileCell("causal", "causal", kv_heads=2),
    TileCell("chosen64", "chosen blocks", kv_heads=2, kind="random", small=True),
    TileCell("flags", "flags and a window"),
    TileCell("moba", "table by query and block, causal"),
    TileCell("dense", "dense boolean mask"),
    TileCell("returning", "documents that return, causal"),
    TileCell("chosen1", "chosen blocks of each query", kv_heads=2, kind="near"),
    TileCell("sta", "3 x 3 tiles of a grid"),
    TileCell("padding", "padding, causal"),
    TileCell("causal", "causal", 4096),
    TileCell("islands", "pictures in causal text", 4096),
    TileCell("natten", "neighbourhood of 13 x 13"),
    TileCell("chosen_heads", "chosen blocks of each head", kv_heads=2, kind="random"),
    TileCell("flags", "flags and a window", 4096),
    TileCell("chosen1", "chosen blocks of each query, at random", kv_heads=2, kind="random"),
)


def data_of(cell: TileCell, device: torch.device) -> Data:
    """A cell's data, the same in every run."""
    drawn = DATA[cell.mask](cell, torch.Generator().manual_seed(cell.length))
    return drawn(device)


#: Draws data on the CPU; gives a function that puts them on a device.
Drawn = Callable[[torch.device], Data]


def _causal(cell: TileCell, generator: torch.Generator) -> Drawn:
    return lambda device: Data(causal_mask)


def _islands(cell: TileCell, generator: torch.Generator) -> Drawn:
    """Pictures of `PICTURE` tokens in text, which is 0."""
    at = torch.arange(cell.length)
    within = (at + 100) % PICTURE_EVERY
    ids = torch.where(within >= PICTURE_EVERY - PICTURE, 1 + (at + 100) // PICTURE_EVERY, 0).int()

    def put(device: torch.device) -> Data:
        img = ids.to(device)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) | ((img[q_idx] == img[kv_idx]) & (img[q_idx] > 0))

        return Data(mask_mod, {"img": img[None]}, aux=(img,))

    return put


def _flags(cell: TileCell, generator: torch.Generator) -> Drawn:
    """`FLAGS` tokens at random that see all and are seen by all."""
    flags = torch.zeros(cell.length, dtype=torch.bool)
    flags[torch.randperm(cell.length, generator=generator)[:FLAGS]] = True

    def put(device: torch.device) -> Data:
        flag = flags.to(device)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return flag[q_idx] | flag[kv_idx] | ((q_idx - kv_idx).abs() <= NEAR)

        return Data(mask_mod, {"flag": flag}, aux=(flag.int(),))

    return put


def _padding(cell: TileCell, generator: torch.Generator) -> Drawn:
    """The last keys are padding."""
    keeps = (torch.arange(cell.length) < cell.length - cell.length // PADDED).int()

    def put(device: torch.device) -> Data:
        keep = keeps.to(device)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) & (keep[kv_idx] > 0)

        return Data(mask_mod, {"keep": keep[None]}, aux=(keep,))

    return put


def _returning(cell: TileCell, generator: torch.Generator) -> Drawn:
    """Parts of a few documents, one after the other, in any order."""
    parts = 2 * cell.length // RUN + 2
    lengths = torch.randint(RUN // 3, 2 * RUN - RUN // 3, (parts,), generator=generator)
    numbers = torch.randint(0, DOCUMENTS, (parts,), generator=generator, dtype=torch.int32)
    drawn = numbers.repeat_interleave(lengths)[: cell.length]

    def put(device: torch.device) -> Data:
        ids = drawn.to(device)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) & (ids[q_idx] == ids[kv_idx])

        return Data(mask_mod, {"ids": ids[None]}, aux=(ids,))

    return put


def _moba(cell: TileCell, generator: torch.Generator) -> Drawn:
    """For each head, its own block and others; the queries of a block choose alike."""
    blocks = -(-cell.length // BLOCK)
    lots = torch.rand(cell.heads, blocks, blocks, generator=generator)
    rows = lots.argsort(-1) < GATED
    rows |= torch.eye(blocks, dtype=torch.bool)

    def put(device: torch.device) -> Data:
        gate = rows.to(device).repeat_interleave(BLOCK, 1)[:, : cell.length].contiguous()

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (kv_idx <= q_idx) & gate[h, q_idx, kv_idx // BLOCK]

        return Data(mask_mod, {"gate": gate}, cell.heads, aux=(gate.int(),))

    return put


def _dense(cell: TileCell, generator: torch.Generator) -> Drawn:
    """An eighth of the sequence to both sides, and the first keys."""

    def put(device: torch.device) -> Data:
        at = torch.arange(cell.length, device=device, dtype=torch.int32)
        seen = ((at[:, None] - at).abs() < cell.length // 8) | (at < FIRST)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return seen[q_idx, kv_idx]

        return Data(mask_mod, {"seen": seen}, aux=(seen.view(torch.uint8),))

    return put


def _sta(cell: TileCell, generator: torch.Generator) -> Drawn:
    """Tiles of 64 tokens in rows of `ROW`, as in sliding tile attention."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = (q_idx // BLOCK // ROW).clamp(1, ROW - 2) - kv_idx // BLOCK // ROW
        columns = (q_idx // BLOCK % ROW).clamp(1, ROW - 2) - kv_idx // BLOCK % ROW
        return (rows.abs() <= 1) & (columns.abs() <= 1)

    return lambda device: Data(mask_mod)


def _natten(cell: TileCell, generator: torch.Generator) -> Drawn:
    """The neighbourhood of a pixel, pushed back into the image."""
    half = WINDOW // 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = (q_idx // SIDE).clamp(half, SIDE - 1 - half) - kv_idx // SIDE
        columns = (q_idx % SIDE).clamp(half, SIDE - 1 - half) - kv_idx % SIDE
        return (rows.abs() <= half) & (columns.abs() <= half)

    return lambda device: Data(mask_mod)


def _chosen(query_block: int, of_queries: bool = False) -> Callable[..., Drawn]:
    """Lists of `CHOSEN` blocks for each head of keys, or of q, and block of queries."""

    def drawn(cell: TileCell, generator: torch.Generator) -> Drawn:
        heads = cell.heads if of_queries else cell.kv_heads
        each = cell.heads // heads

        def put(device: torch.device) -> Data:
            chosen = lists(heads, cell.length, query_block, cell.kind, device)
            table = table_of_lists(chosen[0], None, -(-cell.length // BLOCK))

            def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return (kv_idx <= q_idx) & table[h // each, q_idx // query_block, kv_idx // BLOCK]

            return Data(mask_mod, {"chosen": chosen}, heads, aux=(table.int(),))

        return put

    return drawn


def lists(
    heads: int, length: int, query_block: int, kind: str, device: torch.device
) -> torch.Tensor:
    """int32 (1, heads, lists, `CHOSEN`): the own block, then earlier ones; -1 if there are no more.

    Near lists have the first block, and for the queries of a block three quarters of their entries
    in common.
    """
    rows, blocks = -(-length // query_block), -(-length // BLOCK)
    generator = torch.Generator(device).manual_seed(length)

    def lots(rows: int) -> torch.Tensor:
        return torch.rand(heads, rows, blocks, device=device, generator=generator)

    at = torch.arange(blocks, device=device)
    own = torch.arange(rows, device=device)[:, None] * query_block // BLOCK
    if kind == "near":
        drawn = lots(blocks).repeat_interleave(BLOCK // query_block, 1)[:, :rows]
        other = lots(rows)
        drawn = torch.where(other < 0.25 * CHOSEN / blocks, 1 + other, drawn)
        drawn[..., 0] = 3.0
    else:
        drawn = lots(rows)
    drawn = torch.where(at == own, 4.0, drawn.masked_fill(at > own, -1.0))
    best, index = drawn.topk(min(CHOSEN, blocks), -1)
    return torch.where(best >= 0, index, -1).int()[None].contiguous()


DATA: dict[str, Callable[[TileCell, torch.Generator], Drawn]] = {
    "causal": _causal,
    "islands": _islands,
    "flags": _flags,
    "padding": _padding,
    "returning": _returning,
    "moba": _moba,
    "dense": _dense,
    "sta": _sta,
    "natten": _natten,
    "chosen64": _chosen(BLOCK),
    "chosen1": _chosen(1),
    "chosen_heads": _chosen(BLOCK, of_queries=True),
}
