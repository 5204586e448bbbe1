from flashgen import AttentionSpec, Constant

lengths = Constant("lengths", [128, 512], dims=("batch",))

spec = AttentionSpec(head_dim=64, mask=lambda b, h, q_idx, kv_idx: kv_idx < lengths[b])
