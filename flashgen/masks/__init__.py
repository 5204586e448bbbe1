"""Masks: which keys a query sees, as a predicate on positions.

A mask is any function ``(b, h, q_idx, kv_idx) -> bool`` made of integer arithmetic, comparisons and
``& | ~``: the signature of FlexAttention's ``mask_mod``. The ones here are such functions and
nothing more: flashgen never looks at a mask's name, only at what its function returns.
"""

from flashgen.masks.chosen import chosen_blocks
from flashgen.masks.mask import Mask, MaskMod, as_mask
from flashgen.masks.positional import (
    causal,
    chunked,
    full,
    global_tokens,
    prefix_lm,
    sink_tokens,
    sliding_window,
)
from flashgen.masks.sparse import dilated, natten_2d, strided
from flashgen.masks.tables import bigbird, block_sparse, document, random_blocks, tree

__all__ = [
    "Mask",
    "MaskMod",
    "as_mask",
    "bigbird",
    "block_sparse",
    "causal",
    "chosen_blocks",
    "chunked",
    "dilated",
    "document",
    "full",
    "global_tokens",
    "natten_2d",
    "prefix_lm",
    "random_blocks",
    "sink_tokens",
    "sliding_window",
    "strided",
    "tree",
]
