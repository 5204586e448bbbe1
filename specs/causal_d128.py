"""Causal self-attention, for q_len == kv_len."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=causal())
