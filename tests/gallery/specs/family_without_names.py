from flashgen import AttentionSpec

specs = [AttentionSpec(head_dim=64, name="small"), AttentionSpec(head_dim=128)]
