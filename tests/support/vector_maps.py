"""Linear attention with features of whole vectors, by all weights in float64; calls to try it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, exp, feature_sum, sqrt, where
from flashgen.feature_maps import Favor
from flashgen.normalisers import Linear
from support.oracle import error_and_bound
from support.recurrence import LinearCall, drawn_inputs, is_causal

Tensors = tuple[torch.Tensor, ...]
Map = Callable[[torch.Tensor], torch.Tensor]


def both_signs(x: Any) -> Any:
    """Two features of each element."""
    return [where(x > 0.0, x, 0.0), where(x < 0.0, -x, 0.0)]


def standardised(x: Any) -> Any:
    """A sum that reads another one, of 24 elements."""
    centred = x - feature_sum(x) / 24.0
    return exp(centred / sqrt(feature_sum(centred * centred) / 24.0 + 0.1))


def _standardised(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(
        (x - x.mean(-1, True)) / (x.var(-1, unbiased=False, keepdim=True) + 0.1).sqrt()
    )


#: Maps as torch has them.
MAPS: dict[str, Map] = {
    "softmax_features()": lambda x: torch.softmax(x, -1),
    "both_signs": lambda x: torch.cat((x.relu(), (-x).relu()), -1),
    "standardised": _standardised,
}


@dataclass(frozen=True)
class VectorCall(LinearCall):
    """One call.

    Attributes:
        steep: what q and k are multiplied by.
        scale: of the call; None is the spec's.
    """

    steep: float = 1.0
    scale: float | None = None


def by_weights(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    matrix: torch.Tensor | None = None,
    scale: float | None = None,
    rounded: torch.dtype | None = None,
) -> torch.Tensor:
    """The output by its definition, with features in ``rounded`` if given."""
    normaliser = spec.normaliser
    assert isinstance(normaliser, Linear)
    group = q.shape[1] // k.shape[1]
    scale = spec.qk_head_dim**-0.5 if scale is None else scale
    phi_q = _features(normaliser, q, matrix, scale, (-1,))
    phi_k = _features(normaliser, k, matrix, scale, (-2, -1))
    if rounded is not None:
        phi_q, phi_k = (x.to(rounded).to(q.dtype) for x in (phi_q, phi_k))
    weights = phi_q @ phi_k.repeat_interleave(group, 1).mT
    weights = weights.tril() if is_causal(spec) else weights
    acc = weights @ v.repeat_interleave(group, 1)
    return acc / weights.sum(-1, keepdim=True) if normaliser.normalise else scale * acc


def _features(
    normaliser: Linear, x: Any, matrix: Any, scale: float, alike: tuple[int, ...]
) -> torch.Tensor:
    """Features, divided by the largest one over the dimensions ``alike`` where that cancels."""
    feature_map = normaliser.feature_map
    if isinstance(feature_map, Favor):
        x = x * scale**0.5
        exponents = x @ matrix.mT - (x * x).sum(-1, keepdim=True) / 2
        return torch.exp(exponents - exponents.detach().amax(alike, keepdim=True))
    return MAPS[feature_map.label](x)


def check_vectors(module: ModuleType, spec: AttentionSpec, call: VectorCall) -> None:
    """Fails unless output and gradients are as near to float64 as torch's."""
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["USE_TMA"] = call.tma
    q, k, v = drawn_inputs(spec, call)
    tensors = (q * call.steep, k * call.steep, v)
    dtype = tensors[0].dtype
    drawn = (module.draw_features(1),) if spec.normaliser.feature_map.random else ()
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    scale = {} if call.scale is None else {"scale": call.scale}
    out = module.attention(q, k, v, *drawn, **scale)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = (out, *torch.autograd.grad(out, (q, k, v), grad))
    exact, rough = (
        _with_gradients(spec, tensors, drawn, call.scale, grad, *types)
        for types in ((torch.float64, None), (torch.float32, dtype))
    )
    for name, x, right, low in zip(("out", "dq", "dk", "dv"), mine, exact, rough, strict=True):
        assert x.shape == right.shape, f"{name}: {tuple(x.shape)}, not {tuple(right.shape)}"
        error, allowed = error_and_bound(x.detach(), right.detach(), low.detach())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _with_gradients(
    spec: AttentionSpec,
    tensors: Tensors,
    drawn: Tensors,
    scale: float | None,
    grad: torch.Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype | None,
) -> Tensors:
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    matrix = drawn[0].to(dtype) if drawn else None
    out = by_weights(spec, *leaves, matrix, scale, rounded)
    grads = torch.autograd.grad(out, leaves, grad.to(dtype))
    return tuple(x if rounded is None else x.to(rounded) for x in (out, *grads))


def digest_of(matrix: torch.Tensor) -> str:
    """The bits of a matrix, as a number to compare."""
    bits = matrix.contiguous().view(torch.int32 if matrix.dtype == torch.float32 else torch.int16)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
