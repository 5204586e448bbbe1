from flashgen import AttentionSpec, Blocks, causal

spec = AttentionSpec(
    head_dim=256,
    mask=causal(),
    blocks=Blocks(BLOCK_M=64, BLOCK_N=128, num_stages=2),
    targets=("sm_90", "sm_86"),
)
