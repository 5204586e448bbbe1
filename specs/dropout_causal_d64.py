"""Causal, with dropout: each call says how many weights it drops, and may say by which seed."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(
    head_dim=64,
    dtype="bfloat16",
    mask=causal(align="bottom_right"),
    dropout=True,
)
