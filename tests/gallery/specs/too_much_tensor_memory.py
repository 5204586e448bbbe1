from flashgen import AttentionSpec, Blocks

spec = AttentionSpec(
    head_dim=256,
    blocks=Blocks(BLOCK_M=128, BLOCK_N=256, num_warps=8, num_stages=1),
    targets=("sm_100",),
)
