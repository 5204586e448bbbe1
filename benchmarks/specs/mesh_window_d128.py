"""A causal window, with positions in a whole that is on several GPUs."""

from flashgen import AttentionSpec, Int, sliding_window

left = Int("left", default=4095, doc="keys before its own that a query sees")
spec = AttentionSpec(128, mask=sliding_window(left, 0), forms=("dense", "mesh"))
