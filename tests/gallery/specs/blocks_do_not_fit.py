from flashgen import AttentionSpec, Blocks, causal

spec = AttentionSpec(
    head_dim=256,
    mask=causal(),
    blocks=Blocks(BLOCK_M=128, BLOCK_N=128, num_stages=3),
    targets=("sm_90", "sm_80", "gfx942"),
)
