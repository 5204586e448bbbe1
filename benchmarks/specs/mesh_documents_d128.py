"""Causal within documents, with positions in a whole that is on several GPUs."""

from flashgen import AttentionSpec, causal, document

spec = AttentionSpec(128, mask=document() & causal(), forms=("dense", "mesh"))
