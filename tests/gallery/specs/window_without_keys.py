from flashgen import AttentionSpec, sliding_window

spec = AttentionSpec(head_dim=64, mask=sliding_window(-1, 0))
