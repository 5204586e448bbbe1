"""Causal in float16."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=128, dtype="float16", mask=causal(align="bottom_right"))
