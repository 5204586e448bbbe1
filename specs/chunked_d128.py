"""Causal within chunks of positions (Llama 4), their size an argument of the call."""

from flashgen import AttentionSpec, Int, causal, chunked

chunk = Int("chunk", default=2048, min=1, doc="positions of a chunk")
spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=chunked(chunk) & causal())
