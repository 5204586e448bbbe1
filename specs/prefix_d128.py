"""Prefix-LM: every query sees the first keys, and those up to its own; prefix=4096 by default."""

from flashgen import AttentionSpec, Int, prefix_lm

prefix = Int("prefix", default=4096, doc="keys that every query sees")
spec = AttentionSpec(head_dim=128, dtype="bfloat16", mask=prefix_lm(prefix))
