from flashgen import AttentionSpec, Int, sliding_window

left = Int("left", 128, doc="keys before its own\nthat a query sees")

spec = AttentionSpec(head_dim=64, mask=sliding_window(left, 0))
