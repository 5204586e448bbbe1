"""flashgen: a compiler for attention kernels. These are the names that a spec file uses."""

from flashgen.expr import Int, kv_len, q_len
from flashgen.masks import Mask, causal, full, sliding_window
from flashgen.spec import AttentionSpec, Blocks

__all__ = [
    "AttentionSpec",
    "Blocks",
    "Int",
    "Mask",
    "causal",
    "full",
    "kv_len",
    "q_len",
    "sliding_window",
]
