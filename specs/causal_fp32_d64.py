"""Causal in float32 on the tf32 matrix units."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(
    head_dim=64,
    dtype="float32",
    input_precision="tf32",
    mask=causal(align="bottom_right"),
)
