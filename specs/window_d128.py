"""A causal sliding window whose width is an argument of the call: left=1024 unless it says else."""

from flashgen import AttentionSpec, Int, sliding_window

left = Int("left", default=1024, min=0)
spec = AttentionSpec(
    head_dim=128,
    dtype="bfloat16",
    mask=sliding_window(left=left, right=0, align="bottom_right"),
)
