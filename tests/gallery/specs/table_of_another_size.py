from flashgen import AttentionSpec, Tensor, relative_bias

table = Tensor("table", ("num_q_heads", 128))

spec = AttentionSpec(head_dim=64, score=relative_bias(64, table))
