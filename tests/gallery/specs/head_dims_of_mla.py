from flashgen import AttentionSpec, causal

spec = AttentionSpec(head_dim=(576, 512), mask=causal())
