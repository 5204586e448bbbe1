from flashgen import AttentionSpec


def band(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and q_idx - kv_idx < 128


spec = AttentionSpec(head_dim=64, mask=band)
