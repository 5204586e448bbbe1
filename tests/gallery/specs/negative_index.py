from flashgen import AttentionSpec, Tensor

bias = Tensor("bias", ("num_q_heads", "kv_len"))


def last(score, b, h, q_idx, kv_idx):
    return score + bias[h, -1]


spec = AttentionSpec(head_dim=64, score=last)
