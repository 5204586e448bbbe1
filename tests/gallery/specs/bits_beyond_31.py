from flashgen import AttentionSpec, Tensor

words = Tensor("words", ("q_len", None), "int32")


def seen(b, h, q_idx, kv_idx):
    return (words[q_idx, kv_idx // 32] & (1 << (kv_idx % 32))) != 0


spec = AttentionSpec(head_dim=64, mask=seen)
