"""Causal, with positions in a whole that is on several GPUs."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(128, mask=causal(), forms=("dense", "mesh"))
