from flashgen import AttentionSpec


def widened(score, b, h, q_idx, kv_idx):
    return score + kv_idx.expand(4)


spec = AttentionSpec(head_dim=64, score=widened)
