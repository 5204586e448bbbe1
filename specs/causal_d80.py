"""Causal with heads of 80, computed as 64 + 16; query 0 sees key 0."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=80, dtype="bfloat16", mask=causal(align="top_left"))
