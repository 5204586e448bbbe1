from flashgen import AttentionSpec


def scattered(b, h, q_idx, kv_idx):
    return (q_idx * 2654435761 + kv_idx) % 65536 < 4096


spec = AttentionSpec(head_dim=64, mask=scattered)
