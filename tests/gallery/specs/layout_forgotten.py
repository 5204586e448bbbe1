from flashgen import AttentionSpec, block_sparse

spec = AttentionSpec(head_dim=64, mask=block_sparse(128))
