from flashgen import AttentionSpec


def distance(b, h, q_idx, kv_idx):
    return q_idx - kv_idx


spec = AttentionSpec(head_dim=64, mask=distance)
