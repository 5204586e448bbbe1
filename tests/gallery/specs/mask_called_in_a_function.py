from flashgen import AttentionSpec, causal


def mine(b, h, q_idx, kv_idx):
    return causal()(b, h, q_idx, kv_idx) & (kv_idx > 3)


spec = AttentionSpec(head_dim=64, mask=mine)
