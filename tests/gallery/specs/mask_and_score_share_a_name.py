from flashgen import AttentionSpec, Float, Int, sliding_window, softcap

cap = Float("size", 30.0, above=0.0)

spec = AttentionSpec(head_dim=64, mask=sliding_window(Int("size", 1024), 0), score=softcap(cap))
