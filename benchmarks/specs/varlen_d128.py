"""Packed sequences with as many keys as queries: the table of benchmarks.varlen."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=causal(),
    forms=("dense", "varlen"),
    targets=("sm_90",),
)
