"""Steps of decoding with a cache: the table of benchmarks.cache."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=causal(align="bottom_right"),
    forms=("dense", "cache"),
    targets=("sm_90",),
)
