"""Score and mask functions for FlashAttention 4, in CuTe, as a user would write them.

They cover the attentions of `benchmarks.attentions` for which FlashAttention 4 has no argument. On
Hopper a score function
goes with ``causal=True``; a mask function replaces this argument, and a table of blocks lists the
blocks to visit and the blocks that need no mask.

Importing this module needs flash-attn-4.
"""

# No `from __future__ import annotations`: the compiler of these functions reads their source.

from collections.abc import Callable
from typing import Any

import cutlass  # type: ignore[import-not-found]
import torch
from cutlass import cute
from flash_attn.cute import utils  # type: ignore[import-not-found]
from flash_attn.cute.block_sparsity import (  # type: ignore[import-not-found]
    BlockSparseTensorsTorch,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.attentions import MaskMod
from benchmarks.tile_cells import BLOCK as LISTED
from benchmarks.tile_cells import NEAR, ROW, SIDE, WINDOW

#: Queries and keys of a block: FlashAttention 4's own tiles at head_dim 128.
BLOCK = 128


def alibi() -> Any:
    """A bias that falls with the distance, at each of 16 heads at another rate."""

    @cute.jit
    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * -0.5, fastmath=True)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    return score_mod


def prefix(end: int) -> Any:
    """Causal, and the first ``end`` keys visible to every query."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return (kv_idx < end) | (q_idx >= kv_idx)

    return mask_mod


def chunked(size: int) -> Any:
    """Causal within chunks of ``size`` positions."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return (q_idx // size == kv_idx // size) & (q_idx >= kv_idx)

    return mask_mod


def sink_window(sinks: int, left: int) -> Any:
    """Causal, ``left`` keys back and the first ``sinks`` keys of the sequence."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= left) | (kv_idx < sinks))

    return mask_mod


def islands(group: int) -> Any:
    """Causal, and the tokens of a picture see one another; the pictures' ids are read."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        mine = utils.scalar_to_ssa(aux_tensors[0][q_idx[0]], cutlass.Int32)
        its = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
        return (q_idx >= kv_idx) | ((mine == its) & (mine > 0))

    return mask_mod


def flags(group: int) -> Any:
    """Flagged tokens see all and are seen by all; a window for the others."""
    near = NEAR

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        mine = utils.scalar_to_ssa(aux_tensors[0][q_idx[0]], cutlass.Int32)
        its = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
        return ((q_idx - kv_idx <= near) & (kv_idx - q_idx <= near)) | (mine > 0) | (its > 0)

    return mask_mod


def padding(group: int) -> Any:
    """Causal, of the keys that are kept."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        its = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
        return (q_idx >= kv_idx) & (its > 0)

    return mask_mod


def returning(group: int) -> Any:
    """Causal within documents, whose ids are read."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        mine = utils.scalar_to_ssa(aux_tensors[0][q_idx[0]], cutlass.Int32)
        its = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
        return (q_idx >= kv_idx) & (mine == its)

    return mask_mod


def listed(query_block: int) -> Any:
    """Causal, of the blocks of keys that a table (heads, blocks of queries, blocks) shows.

    The result takes the number of heads of q that share a row of the table.
    """
    block = LISTED

    def of(group: int) -> Any:
        @cute.jit
        def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            row, column = q_idx[0] // query_block, kv_idx[0] // block
            shown = aux_tensors[0][h[0] // group, row, column]
            return (q_idx >= kv_idx) & (utils.scalar_to_ssa(shown, cutlass.Int32) > 0)

        return mask_mod

    return of


def dense(group: int) -> Any:
    """A table of 0 and 1 for each query and key."""

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        shown = aux_tensors[0][q_idx[0], kv_idx[0]]
        return utils.scalar_to_ssa(shown, cutlass.Uint8) != 0

    return mask_mod


def sta(group: int) -> Any:
    """3 by 3 tiles of a grid of tiles, pushed back into it at the borders."""
    size, row = LISTED, ROW

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        q_row, kv_row = q_idx // size // row, kv_idx // size // row
        q_column, kv_column = q_idx // size % row, kv_idx // size % row
        rows = (q_row - kv_row <= 1) & (kv_row - q_row <= 1)
        rows = rows | ((q_row < 1) & (kv_row < 3)) | ((q_row > row - 2) & (kv_row > row - 4))
        columns = (q_column - kv_column <= 1) & (kv_column - q_column <= 1)
        columns = columns | ((q_column < 1) & (kv_column < 3))
        columns = columns | ((q_column > row - 2) & (kv_column > row - 4))
        return rows & columns

    return mask_mod


def natten(group: int) -> Any:
    """The neighbourhood of a pixel, pushed back into the image at the borders."""
    side, half = SIDE, WINDOW // 2

    @cute.jit
    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        q_row, kv_row = q_idx // side, kv_idx // side
        q_column, kv_column = q_idx % side, kv_idx % side
        rows = (q_row - kv_row <= half) & (kv_row - q_row <= half)
        rows = rows | ((q_row < half) & (kv_row <= 2 * half))
        rows = rows | ((q_row >= side - half) & (kv_row >= side - 1 - 2 * half))
        columns = (q_column - kv_column <= half) & (kv_column - q_column <= half)
        columns = columns | ((q_column < half) & (kv_column <= 2 * half))
        columns = columns | ((q_column >= side - half) & (kv_column >= side - 1 - 2 * half))
        return rows & columns

    return mask_mod


#: The masks of `benchmarks.tile_cells`, each for so many heads of q that have one mask.
DECIDED = {
    "islands": islands,
    "flags": flags,
    "padding": padding,
    "returning": returning,
    "moba": listed(1),
    "dense": dense,
    "sta": sta,
    "natten": natten,
    "chosen64": listed(LISTED),
    "chosen1": listed(1),
    "chosen_heads": listed(LISTED),
}


def blocks_of(mask_mod: MaskMod, seq_len: int, device: torch.device) -> BlockSparseTensorsTorch:
    """Blocks of `BLOCK` by `BLOCK` with visible pairs, and blocks with visible pairs only.

    Counts are (1, 1, ceil(seq_len / BLOCK)) int32; indices of key blocks have one more dimension.
    """
    return both_blocks_of(mask_mod, seq_len, device)[0]


def both_blocks_of(
    mask_mod: MaskMod,
    seq_len: int,
    device: torch.device,
    heads: int | None = None,
    make: Callable[..., BlockMask] = create_block_mask,
) -> tuple[BlockSparseTensorsTorch, BlockSparseTensorsTorch]:
    """`blocks_of`, and the blocks of queries of each block of keys, which the backward pass reads.

    Args:
        mask_mod: the mask.
        seq_len: queries and keys.
        device: where the tables are.
        heads: of q, if they have masks of their own.
        make: create_block_mask, or a compiled one.
    """
    found: Any = make(mask_mod, None, heads, seq_len, seq_len, device=device.type, BLOCK_SIZE=BLOCK)
    of_queries = _blocks(
        (found.kv_num_blocks, found.kv_indices),
        (found.full_kv_num_blocks, found.full_kv_indices),
    )
    of_keys = _blocks(
        (found.q_num_blocks, found.q_indices),
        (found.full_q_num_blocks, found.full_q_indices),
    )
    return of_queries, of_keys


def _blocks(
    partly: tuple[torch.Tensor, torch.Tensor], whole: tuple[torch.Tensor, torch.Tensor]
) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(
        mask_block_cnt=partly[0],
        mask_block_idx=partly[1],
        full_block_cnt=whole[0],
        full_block_idx=whole[1],
        block_size=(BLOCK, BLOCK),
    )
