from flashgen import AttentionSpec, causal, full

spec = AttentionSpec(head_dim=64, mask=full() - causal())
