import torch

from flashgen import AttentionSpec


@torch.library.custom_op("gallery::tanh", mutates_args=())
def fast_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def capped(score, b, h, q_idx, kv_idx):
    return 30 * fast_tanh(score / 30)


spec = AttentionSpec(head_dim=64, score=capped)
