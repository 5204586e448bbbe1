from flashgen import AttentionSpec, Tensor

lengths = Tensor("lengths", ("batch",), "int32")


def inside(b, h, q_idx, kv_idx):
    return kv_idx < sum(lengths)


spec = AttentionSpec(head_dim=64, mask=inside)
