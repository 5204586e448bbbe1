from flashgen import AttentionSpec, Blocks

specs = [
    AttentionSpec(head_dim=7, dtype="int8", name="first"),
    AttentionSpec(head_dim=64, blocks=Blocks(num_stages=9), name="second"),
]
