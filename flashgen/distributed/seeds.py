"""The seed of a call with dropout: one for all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def check_seed(seed: Any) -> None:
    """Fails unless it is a seed that a call may have.

    Raises:
        TypeError: neither None, an int, nor an int64 tensor of one element.
        ValueError: an int of more than 64 bits.
    """
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed: got {tuple(seed.shape)} {seed.dtype}; pass an int64 tensor of one element"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                f"seed: got {type(seed).__name__}; pass an int64 tensor of one element, an int, "
                "or None"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: got {seed}; pass an int of 64 bits")


def shared_seed(seed: torch.Tensor | int | None, group: Any, device: torch.device) -> torch.Tensor:
    """The seed of the group's first rank as a tensor of one element, without waiting for it.

    None is drawn by torch's generator, whose state a checkpoint keeps: the same weights are dropped
    where the forward pass is computed again.
    """
    if seed is None:
        shared = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    elif isinstance(seed, torch.Tensor):
        shared = seed.detach().reshape(1).to(device, copy=True)
    else:
        shared = torch.full((1,), seed, dtype=torch.int64, device=device)
    dist.broadcast(shared, dist.get_global_rank(group, 0), group=group)
    return shared
