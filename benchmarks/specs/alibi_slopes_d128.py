"""Causal with ALiBi's bias at slopes that are learned, of which no module ships."""

from flashgen import AttentionSpec, Tensor, alibi, causal

slopes = Tensor("slopes", ("num_q_heads",), doc="what a step back takes off each head's scores")
spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=causal(), score=alibi(slopes))
