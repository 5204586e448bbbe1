import torch

from flashgen import AttentionSpec

slopes = torch.ones(16)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes * (kv_idx - q_idx)


spec = AttentionSpec(head_dim=64, score=alibi)
