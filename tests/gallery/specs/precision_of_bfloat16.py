from flashgen import AttentionSpec

spec = AttentionSpec(head_dim=64, input_precision="tf32")
