import torch

from flashgen import AttentionSpec, block_sparse

counts = torch.tensor([[3, 0], [1, 2]])

spec = AttentionSpec(head_dim=64, mask=block_sparse(counts, block=64))
