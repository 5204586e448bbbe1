from flashgen import AttentionSpec, Int, sink_tokens, sliding_window

mask = sliding_window(Int("width", 1024), 0) | sink_tokens(Int("width", 4))
spec = AttentionSpec(head_dim=64, mask=mask)
