from flashgen import AttentionSpec


def rounded(score, b, h, q_idx, kv_idx):
    return score + ((q_idx - kv_idx) * 0.1).bfloat16().float()


spec = AttentionSpec(head_dim=64, score=rounded)
