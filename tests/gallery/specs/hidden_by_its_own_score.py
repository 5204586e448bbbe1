import math

from flashgen import AttentionSpec, where


def positive(score, b, h, q_idx, kv_idx):
    return where(score > 0, score, -math.inf)


spec = AttentionSpec(head_dim=64, score=positive)
