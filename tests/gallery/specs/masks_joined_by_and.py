from flashgen import AttentionSpec, causal, sliding_window

spec = AttentionSpec(head_dim=64, mask=causal() and sliding_window(left=5, right=9))
