from flashgen import AttentionSpec

spec = AttentionSpec(64, dropout=True, forms=("dense", "cache"))
