from flashgen import AttentionSpec


def causal(score, b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


spec = AttentionSpec(head_dim=64, score=causal)
