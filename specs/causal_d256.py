"""Causal with wide heads (Gemma)."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=256, dtype="bfloat16", mask=causal(align="bottom_right"))
