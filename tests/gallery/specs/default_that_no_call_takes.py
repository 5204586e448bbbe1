from flashgen import AttentionSpec, Int, sliding_window

spec = AttentionSpec(head_dim=64, mask=sliding_window(Int("left", 2**31), 0))
