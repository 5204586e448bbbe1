from flashgen import AttentionSpec

DIMS = {"small": 64}

spec = AttentionSpec(head_dim=DIMS["large"])
