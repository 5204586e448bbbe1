from flashgen import AttentionSpec, Tensor

window = Tensor("window", (), "int32")


def near(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < window


spec = AttentionSpec(head_dim=64, mask=near)
