from flashgen import AttentionSpec, block_sparse, causal

layout = [
    [1, 0, 0],
    [1, 1],
    [0, 1, 1],
]

spec = AttentionSpec(head_dim=64, mask=block_sparse(layout, block=128) & causal())
