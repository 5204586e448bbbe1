from flashgen import AttentionSpec

spec = AttentionSpec(headdim=64)
