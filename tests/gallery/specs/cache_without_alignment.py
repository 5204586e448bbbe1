from flashgen import AttentionSpec, causal

spec = AttentionSpec(64, mask=causal(), forms=("dense", "cache"))
