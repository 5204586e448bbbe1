from flashgen import AttentionSpec

spec = AttentionSpec(head_dim=0)
