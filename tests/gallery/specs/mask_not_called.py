from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=64, mask=causal)
