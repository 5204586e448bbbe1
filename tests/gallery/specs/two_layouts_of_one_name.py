from flashgen import AttentionSpec, block_sparse

spec = AttentionSpec(
    head_dim=64,
    mask=block_sparse([[1, 0], [1, 1]], block=128) | block_sparse([[0, 1], [1, 0]], block=64),
)
