"""What gradients are held to: float64 autograd, and a backward pass by torch in low precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from flashgen import AttentionSpec
from flashgen.reference import attention_reference, final_scores, weigh
from support.oracle import dropout_of, operand_of, tanh_of_11_bits

Tensors = tuple[torch.Tensor, ...]


def leaves_of(
    tensors: Tensors, given: dict[str, Any], dtype: torch.dtype | None = None
) -> tuple[Tensors, dict[str, Any], dict[str, torch.Tensor]]:
    """What a gradient is asked of: q, k, v; all parameters; those of them that have a gradient.

    They lie in memory as they did: a clone would not, where elements lie apart or are one.
    """

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype or x.dtype).requires_grad_()

    is_float = torch.is_floating_point
    learned = {
        name: leaf(x) for name, x in given.items() if isinstance(x, torch.Tensor) and is_float(x)
    }
    return tuple(map(leaf, tensors)), given | learned, learned


def exact_gradients(
    tensors: Tensors,
    given: dict[str, Any],
    spec: AttentionSpec,
    scale: float | None,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> Tensors:
    """Those of q, k, v and learned tensors in float64; rows without a key have no LSE to move."""
    qkv, params, learned = leaves_of(tensors, given, torch.float64)
    out, lse = attention_reference(
        *qkv,
        spec.mask,
        score=spec.score,
        normaliser=spec.normaliser,
        scale=scale or spec.scale,
        params=params,
        return_lse=True,
    )
    of_lse = (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse.to(lse.dtype)).sum()
    objective = of_lse + (out * grad_out.to(out.dtype)).sum()
    return torch.autograd.grad(objective, (*qkv, *learned.values()), materialize_grads=True)


def rough_gradients(
    tensors: Tensors,
    given: dict[str, Any],
    spec: AttentionSpec,
    scale: float | None,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[Tensors, float]:
    """The same by torch as flash attention computes them, and the largest log-sum-exp.

    In float32, with what matrix units read rounded to the tensors' dtype, from an output that was
    rounded too: sums that cancel in exact arithmetic do so no better here.
    """
    q, k, v = tensors
    dtype, operand = q.dtype, operand_of(spec, q)
    scale = scale or spec.scale or spec.qk_head_dim**-0.5
    group = q.shape[1] // k.shape[1]
    keys, values = (operand(x.repeat_interleave(group, dim=1)) for x in (k, v))
    queries, grads = operand(q), operand(grad_out.to(dtype))
    _, params, learned = leaves_of((), given, torch.float32)
    products = (queries @ keys.mT).requires_grad_()
    with tanh_of_11_bits() if q.is_cuda and dtype != torch.float32 else nullcontext():
        scores = final_scores(products * scale, spec.mask, spec.score, params=params)
    weights, lse = weigh(scores.detach(), spec.normaliser, params=params)
    weights, seen = weights.detach(), lse != -torch.inf
    keeps, growth = dropout_of(weights, params)
    shares = operand((weights * keeps).to(dtype))
    out = (shares @ values * growth).to(dtype).float()
    of_lse = grad_lse.float().masked_fill(~seen, 0.0)
    if spec.normaliser.kind == "sigmoid":
        delta = -of_lse * torch.exp(-lse.masked_fill(~seen, 0.0))
        slopes = weights * (1 - weights)
    else:
        delta, slopes = (out * grad_out.float()).sum(-1) - of_lse, weights
    of_scores = slopes * (keeps * growth * (grads @ values.mT) - delta[..., None])
    of_scores = of_scores.masked_fill(weights == 0, 0.0)

    # The score function's own derivatives, and the sink's: it has a weight, and no value.
    leaves = (products, *learned.values())
    nothing = 0.0 * sum(x.sum() for x in leaves)  # also of a score that none of them changes
    of_products, *of_learned = torch.autograd.grad(scores + nothing, leaves, of_scores)
    if learned and lse.requires_grad:
        of_sink = torch.autograd.grad(
            lse, tuple(learned.values()), -delta, allow_unused=True, materialize_grads=True
        )
        of_learned = [one + other for one, other in zip(of_learned, of_sink, strict=True)]
    of_products = operand(of_products.nan_to_num(0.0).to(dtype))

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    grad_q, grad_k = of_products @ keys, grouped(of_products.mT @ queries)
    results = (grad_q, grad_k, grouped(shares.mT @ grads) * growth)
    finite = lse.detach()[seen]
    size = finite.abs().max().item() if finite.numel() else 0.0
    rounded = [x.to(dtype) for x in results]
    rounded += [x.to(given[name].dtype) for name, x in zip(learned, of_learned, strict=True)]
    return tuple(rounded), size
