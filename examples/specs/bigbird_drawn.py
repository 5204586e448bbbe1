"""BigBird whose random blocks are drawn when the module is built, so that no call passes them.

For encoders of up to 4096 tokens; with its seed, a layer of another model gets blocks of its own.

    out = bigbird_drawn.attention(q, k, v)
"""

import torch

from flashgen import AttentionSpec, bigbird, random_blocks

drawn = random_blocks(1, 4096, block=64, count=3, generator=torch.Generator().manual_seed(0))
spec = AttentionSpec(head_dim=64, dtype="bfloat16", mask=bigbird(64, random=drawn))
