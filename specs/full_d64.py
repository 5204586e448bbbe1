"""Every query sees every key."""

from flashgen import AttentionSpec, full

spec = AttentionSpec(head_dim=64, dtype="bfloat16", mask=full())
