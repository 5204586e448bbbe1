from flashgen import AttentionSpec


def causal(b, h, q_idx, kv_idx):
    q_idx >= kv_idx


spec = AttentionSpec(head_dim=64, mask=causal)
