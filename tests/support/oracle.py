"""What is right: float64, and an error bound that the data itself gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from flashgen import AttentionSpec, full
from flashgen.kernels.forward_hopper.weight_range import RANGES
from flashgen.philox import kept_scale
from flashgen.reference import attention_reference, dropped, final_scores, weigh
from support.cases import Case

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: The logarithm of the first weights' size in the Gluon kernel for bfloat16.
FIRST_WEIGHT = -RANGES["bfloat16"].first * math.log(2.0)


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    tensors: Inputs,
    spec: AttentionSpec,
    case: Case,
    *,
    gluon: bool = False,
) -> None:
    """Fails unless out and lse are as near to float64 as low-precision torch gets, twice over.

    ``error <= 2 * (error of the same computation in low precision with torch) + rounding``, where
    the rounding is a few of float32 and one to out's dtype. A log-sum-exp rounds at the size of the
    scores, which biases can make large where it is small itself; in the Gluon kernel for bfloat16,
    whose first weights are 2^-64, at the size of that power at least.
    """
    q, k, v = tensors
    params = case.arguments(spec, str(q.device))
    scale = case.scale or spec.scale or spec.qk_head_dim**-0.5
    exact = attention_reference(
        q,
        k,
        v,
        spec.mask,
        score=spec.score,
        normaliser=spec.normaliser,
        scale=scale,
        params=params,
        return_lse=True,
    )
    *low, largest_score = low_precision(q, k, v, spec, scale, params)
    shifted = (gluon or q.is_cuda) and q.dtype == torch.bfloat16
    sizes = (0.0, max(largest_score, FIRST_WEIGHT) if shifted else largest_score)
    for name, got, right, rough, size in zip(
        ("out", "lse"), (out, lse), exact, low, sizes, strict=True
    ):
        assert got.shape == right.shape, f"{name}: {tuple(got.shape)}, not {tuple(right.shape)}"
        assert got.dtype == (q.dtype if name == "out" else torch.float32), f"{name}: {got.dtype}"
        if got.numel() == 0:
            continue
        finite = right.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: infinite or NaN where it is not"
        assert torch.equal(got[~finite].double(), right[~finite]), f"{name}: not -inf where empty"
        error, allowed = error_and_bound(got[finite], right[finite], rough[finite], size)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def low_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    scale: float,
    params: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(out, lse) with float32 scores and weights in the inputs' dtype, like matrix units; and the
    size of the largest score, hidden ones among them: a kernel counts distances from the first row
    of a tile, which may see nothing.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
    operand = operand_of(spec, q)
    products = operand(q) @ operand(keys).mT * scale
    with tanh_of_11_bits() if q.is_cuda and q.dtype != torch.float32 else nullcontext():
        scores = final_scores(products, spec.mask, spec.score, params=params)
    weights, lse = weigh(scores, spec.normaliser, params=params)
    keeps, growth = dropout_of(weights, params)
    out = (operand((weights * keeps).to(q.dtype)) @ operand(values) * growth).to(q.dtype)
    everywhere = final_scores(products, full(), spec.score, params=params)
    finite = everywhere[everywhere.isfinite()]
    return out, lse, finite.abs().max().item() if finite.numel() else 0.0


def dropout_of(weights: torch.Tensor, params: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Which weights are kept, as ones and zeros, and by how much those grow."""
    keeps = dropped(torch.ones_like(weights), params) != 0
    return keeps.to(weights.dtype), kept_scale(params.get("dropout_p", 0.0))


def operand_of(spec: AttentionSpec, q: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What matrix units read of a tensor, in float32.

    The interpreter computes tf32 products in full precision, a GPU does not.
    """
    return _tf32 if spec.input_precision == "tf32" and q.is_cuda else torch.Tensor.float


@contextmanager
def tanh_of_11_bits() -> Iterator[None]:
    """Inside, torch's tanh is as exact as the GPU's instruction, which 16-bit kernels use."""
    exact = torch.Tensor.tanh
    with patch.object(torch.Tensor, "tanh", lambda x: exact(x).half().to(x.dtype)):
        yield


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 as matrix units read tf32: the 13 low bits of the mantissa are not looked at.

    cuBLAS rounds its operands first, which no kernel that feeds shared memory to wgmma can do.
    """
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32)


def error_and_bound(
    got: torch.Tensor, right: torch.Tensor, rough: torch.Tensor, size: float = 0.0
) -> tuple[float, float]:
    """``got``'s largest error, and the largest allowed given ``rough`` of low-precision torch.

    ``size`` is that of intermediate values which may be larger than the results.
    """
    if right.numel() == 0:
        return 0.0, 0.0
    roundings = 8 if size else 4  # a bias is scaled, added, compared and given back
    rounding = roundings * torch.finfo(torch.float32).eps + torch.finfo(got.dtype).eps / 2
    largest = max(1.0, size, right.abs().max().item())
    error, of_torch = ((x.double() - right).abs().max().item() for x in (got, rough))
    return error, 2 * of_torch + rounding * largest
