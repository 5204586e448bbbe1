from flashgen import AttentionSpec

attention = AttentionSpec(head_dim=64)
