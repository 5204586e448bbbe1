import torch

from flashgen import AttentionSpec


def probit(score, b, h, q_idx, kv_idx):
    return torch.erfinv(score)


spec = AttentionSpec(head_dim=64, score=probit)
