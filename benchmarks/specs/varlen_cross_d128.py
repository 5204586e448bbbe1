"""Packed sequences whose keys are not as many as their queries: the table of benchmarks.varlen."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=causal(),
    align="bottom_right",
    forms=("dense", "varlen"),
    targets=("sm_90",),
)
