from flashgen import AttentionSpec, Tensor

ids = Tensor("ids", ("batch", "kv_len"), "int32", sorted=True)


def same_document(b, h, q_idx, kv_idx):
    return ids[q_idx] == ids[kv_idx]


spec = AttentionSpec(head_dim=64, mask=same_document)
