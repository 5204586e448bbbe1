from flashgen import AttentionSpec, causal


def ahead(b, h, kv_idx, q_idx):
    return kv_idx - q_idx < 128


specs = [
    AttentionSpec(head_dim=64, mask=ahead, name="alone"),
    AttentionSpec(head_dim=64, score=lambda b, h, score, q_idx, kv_idx: score, name="score"),
]
