from flashgen import AttentionSpec, Constant

penalties = Constant("penalties", [0.0, float("-inf")])


def penalised(score, b, h, q_idx, kv_idx):
    return score + penalties[kv_idx % 2]


spec = AttentionSpec(head_dim=64, score=penalised)
