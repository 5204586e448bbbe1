from flashgen import AttentionSpec

spec = AttentionSpec(head_dim=64, dtype="bf16")
