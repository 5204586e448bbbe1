"""Masks: which keys a query sees, as a predicate on positions.

A mask is any function ``(b, h, q_idx, kv_idx) -> bool`` made of integer arithmetic, comparisons and
``& | ~``: the signature of FlexAttention's ``mask_mod``. The ones here are such functions and
nothing more: flashgen never looks at a mask's name, only at what its function returns.
"""

from flashgen.masks.mask import Mask, MaskMod, as_mask
from flashgen.masks.positional import causal, full, sliding_window

__all__ = ["Mask", "MaskMod", "as_mask", "causal", "full", "sliding_window"]
