from flashgen import AttentionSpec, causal

before = causal(align="top_left")
spec = AttentionSpec(head_dim=64, mask=before & ~before)
