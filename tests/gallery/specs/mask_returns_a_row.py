from flashgen import AttentionSpec, Tensor

chosen = Tensor("chosen", ("batch", None, 2), "int32")


def selected(b, h, q_idx, kv_idx):
    return chosen[b, q_idx // 128] == kv_idx // 128


spec = AttentionSpec(head_dim=64, mask=selected)
