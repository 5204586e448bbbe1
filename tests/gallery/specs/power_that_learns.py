from flashgen import AttentionSpec, Tensor

powers = Tensor("powers", ("num_q_heads",))


def flatter(score, b, h, q_idx, kv_idx):
    return score - abs(q_idx - kv_idx) ** powers[h]


spec = AttentionSpec(head_dim=64, score=flatter)
