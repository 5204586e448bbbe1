"""Sigmoid attention whose weights fade with the distance, and whose keys past a length are padding.

Both functions are what FlexAttention takes; the tensors that they would capture are declared.
The bounds stop at the diagonal and at the padding, whichever comes first.

    out = sigmoid_decay.attention(q, k, v, lengths=lengths, decay=decay)
"""

import torch

from flashgen import AttentionSpec, Tensor, kv_len, log, sigmoid_attention

lengths = Tensor("lengths", ("batch",), "int32", doc="keys of each sequence, without its padding")
decay = Tensor("decay", ("num_q_heads",), doc="what a position of distance takes off a score")


def mask_mod(b, h, q_idx, kv_idx):
    return torch.logical_and(q_idx >= kv_idx, kv_idx < lengths[b])


def score_mod(score, b, h, q_idx, kv_idx):
    return score - decay[h] * torch.abs(q_idx - kv_idx) - log(kv_len)


sigmoid = sigmoid_attention()
spec = AttentionSpec(64, "bfloat16", mask=mask_mod, score=score_mod, normaliser=sigmoid)
