"""Masks as text."""

from __future__ import annotations

import torch

from flashgen import Mask
from flashgen.tracing.expr import bound


def picture(
    mask: Mask, q: int, kv: int, *, b: int = 0, h: int = 0, **params: int | torch.Tensor
) -> list[str]:
    """A row a query, a column a key: x where it is seen."""
    with bound({**params, "q_len": q, "kv_len": kv}):
        return ["".join(".x"[bool(mask.mask_mod(b, h, i, j))] for j in range(kv)) for i in range(q)]
