from flashgen import AttentionSpec


def first(b, h, q_idx, kv_idx):
    return kv_idx < STARTS[b]


STARTS = [4, 8]
spec = AttentionSpec(head_dim=64, mask=first)
