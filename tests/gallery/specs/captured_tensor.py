import torch

from flashgen import AttentionSpec

document_ids = torch.zeros(4096, dtype=torch.int32)


def same_document(b, h, q_idx, kv_idx):
    return document_ids[q_idx] == document_ids[kv_idx]


spec = AttentionSpec(head_dim=64, mask=same_document)
