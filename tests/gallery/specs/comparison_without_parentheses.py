from flashgen import AttentionSpec


def past(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx & kv_idx > 3


spec = AttentionSpec(head_dim=64, mask=past)
