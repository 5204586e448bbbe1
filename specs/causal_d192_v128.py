"""Causal with query and key heads of 192 and value heads of 128 (DeepSeek's MLA prefill)."""

from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=(192, 128), dtype="bfloat16", mask=causal(align="bottom_right"))
