from flashgen import AttentionSpec, Blocks

spec = AttentionSpec(head_dim=64, blocks=Blocks(BLOCK_M=96, BLOCK_N=(32, 48)))
