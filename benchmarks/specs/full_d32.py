"""Every query sees every key, with the narrow heads of a small encoder."""

from flashgen import AttentionSpec, full

spec = AttentionSpec(head_dim=32, dtype="bfloat16", mask=full())
