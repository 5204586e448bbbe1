from flashgen import AttentionSpec


def rounded(score, b, h, q_idx, kv_idx):
    return (score * 8).round() / 8


spec = AttentionSpec(head_dim=64, score=rounded)
