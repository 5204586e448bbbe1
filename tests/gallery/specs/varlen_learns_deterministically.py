from flashgen import AttentionSpec, Tensor, alibi, causal

slopes = Tensor("slopes", ("num_q_heads",))
spec = AttentionSpec(
    64, mask=causal(), score=alibi(slopes), deterministic=True, forms=("dense", "varlen")
)
