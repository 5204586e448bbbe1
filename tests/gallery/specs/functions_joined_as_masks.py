from flashgen import AttentionSpec


def past(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 128


spec = AttentionSpec(head_dim=64, mask=past & near)
