from flashgen import AttentionSpec, Float, Int, sliding_window, softcap

spec = AttentionSpec(
    head_dim=64, mask=sliding_window(Int("size", 1024), 0), score=softcap(Float("size", 30.0))
)
