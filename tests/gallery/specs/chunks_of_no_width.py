from flashgen import AttentionSpec, Int, chunked

spec = AttentionSpec(head_dim=64, mask=chunked(Int("size", 2048)))
