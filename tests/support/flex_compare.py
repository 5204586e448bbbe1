"""A call of `flashgen.flex.flex_attention` beside float64, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from flashgen.flex import flex_attention
from support import flex_oracle
from support.flex_cases import BATCH, HEADS, LENGTH, Case


def qkv(
    q_len: int = LENGTH,
    kv_len: int = LENGTH,
    *,
    heads: int = HEADS,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(BATCH, HEADS, q_len, width, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(BATCH, heads, kv_len, width, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    return q, k, v


def block_mask_of(case: Case, block: int = 16) -> BlockMask | None:
    if case.mask_mod is None:
        return None
    device = torch.get_default_device()
    return create_block_mask(
        case.mask_mod, BATCH, HEADS, case.q_len, case.kv_len, device, BLOCK_SIZE=block
    )


def compare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """Outputs, log-sum-exps and gradients of a case beside those of float64."""
    leaves = (q, k, v, *case.learned)
    out, aux = flex_attention(
        q, k, v, case.score_mod, block_mask_of(case), return_aux=AuxRequest(lse=True), **options
    )
    expected, lse = flex_oracle.attention(q, k, v, case.score_mod, case.mask_mod)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aux.lse, lse.float(), rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(expected)
    mine = torch.autograd.grad(out, leaves, weights.to(out.dtype), allow_unused=True)
    right = torch.autograd.grad(expected, leaves, weights, allow_unused=True)
    for one, other in zip(mine, right, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2e-3, atol=2e-3)


def attended(score_mod: Callable[..., torch.Tensor]) -> None:
    """Holds the output for a score function to float64."""
    inputs = tuple(x.detach() for x in qkv())
    out = flex_attention(*inputs, score_mod)
    expected, _ = flex_oracle.attention(*inputs, score_mod)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)


def square(
    mask_mod: Callable[..., torch.Tensor],
    batch: int = 1,
    heads: int = 1,
    block: int = 8,
    length: int = LENGTH,
) -> BlockMask:
    """A BlockMask of small blocks, with as many queries as keys."""
    return create_block_mask(mask_mod, batch, heads, length, length, "cpu", BLOCK_SIZE=block)
