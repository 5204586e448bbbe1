"""Score and mask functions for FlashAttention 4, in CuTe, as a user would write them.

They cover the attentions of `benchmarks.attentions` for which FlashAttention 4 has no argument. On
Hopper a score function
goes with ``causal=True``; a mask function replaces this argument, and a table of blocks lists the
blocks to visit and the blocks that need no mask.

Importing this module needs flash-attn-4.
"""

# No `from __future__ import annotations`: the compiler of these functions reads their source.

from typing import Any

import cutlass  # type: ignore[import-not-found]
import torch
from cutlass import cute
from flash_attn.cute.block_sparsity import (  # type: ignore[import-not-found]
    BlockSparseTensorsTorch,
)
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.attentions import MaskMod

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


def blocks_of(mask_mod: MaskMod, seq_len: int, device: torch.device) -> BlockSparseTensorsTorch:
    """Blocks of `BLOCK` by `BLOCK` with visible pairs, and blocks with visible pairs only.

    Counts are (1, 1, ceil(seq_len / BLOCK)) int32; indices of key blocks have one more dimension.
    """
    found = create_block_mask(
        mask_mod, None, None, seq_len, seq_len, device=device, BLOCK_SIZE=BLOCK
    )
    return BlockSparseTensorsTorch(
        mask_block_cnt=found.kv_num_blocks,
        mask_block_idx=found.kv_indices,
        full_block_cnt=found.full_kv_num_blocks,
        full_block_idx=found.full_kv_indices,
        block_size=(BLOCK, BLOCK),
    )
