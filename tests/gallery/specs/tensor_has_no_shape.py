from flashgen import AttentionSpec, Tensor

ids = Tensor("ids", ("batch", "kv_len"), "int32")


def not_last(b, h, q_idx, kv_idx):
    return kv_idx < ids.shape[1] - 1


spec = AttentionSpec(head_dim=64, mask=not_last)
