"""Causal with ALiBi's bias at the slopes of 16 heads, in closed form."""

from flashgen import AttentionSpec, alibi, causal

spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=causal(), score=alibi(16))
