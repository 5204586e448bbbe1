from flashgen import AttentionSpec, where


def near(score, b, h, q_idx, kv_idx):
    return where(q_idx >= kv_idx and q_idx - kv_idx < 128, score, score - 1)


spec = AttentionSpec(head_dim=64, score=near)
