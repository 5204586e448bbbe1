from flashgen import AttentionSpec, Tensor

bits = Tensor("bits", ("q_len",), "int32")


def near(b, h, q_idx, kv_idx):
    return (bits[q_idx] >> (q_idx - kv_idx)) & 1


spec = AttentionSpec(head_dim=64, mask=near)
