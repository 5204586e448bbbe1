from flashgen import AttentionSpec


def causal(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return True
    return False


spec = AttentionSpec(head_dim=64, mask=causal)
