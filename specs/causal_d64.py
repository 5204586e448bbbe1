"""Causal; with a longer key sequence the last query sees the last key."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=64, dtype="bfloat16", mask=causal(align="bottom_right"))
