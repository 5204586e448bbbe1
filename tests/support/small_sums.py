"""Queries whose sums of weights float32 holds in part: they count as those whose sums are 0."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec

#: Elements of such a query with `elu_plus_one()`, also in 16 bits: sums of its weights are near
#: 2^-131, and 0.
SUBNORMAL, NONE = -88.0, -200.0
#: Sums near 2^-124, which have inverses; products with what these divide overflow for large values.
TINY = -83.0


def results_with(
    module: ModuleType,
    spec: AttentionSpec,
    of_query: float,
    *,
    run: str = "attention",
    of_lse: float = 1.0,
    **given: Any,
) -> dict[str, torch.Tensor]:
    """What a call returns, and its gradients, where one of 40 queries has this in all elements.

    of_lse is the gradient of the LSE, where there is one.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(1, 2, 40, dim, generator=generator)
        for dim in (spec.qk_head_dim, spec.qk_head_dim, spec.v_head_dim)
    )
    q[:, :, 20] = of_query
    k -= 10.0  # features of q alone are not as small in 16 bits
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, 1e3 * v)]
    out, lse = getattr(module, run)(*leaves, return_lse=True, **given)
    grads = torch.randn(out.shape, generator=generator).to(dtype), of_lse * lse.detach().isfinite()
    found = torch.autograd.grad((out, lse), leaves, grads)
    return dict(zip(("out", "lse", "q", "k", "v"), (out, lse, *found), strict=True))


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The results in which two calls differ in a bit, or that are no numbers."""
    return [
        name
        for name, x in one.items()
        if not torch.equal(x, other[name]) or (name != "lse" and not x.isfinite().all())
    ]
