"""Linear attention with features of whole vectors, by all weights in float64; calls to try it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, exp, feature_sum, sqrt, where
from flashgen.feature_maps import Favor
from flashgen.normalisers import Linear
from support.oracle import error_and_bound
from support.recurrence import (
    LinearCall,
    check_linear,
    decays_of,
    drawn_ids,
    drawn_inputs,
    features_of,
    in_padding,
    is_causal,
    room_on,
    run_arguments,
    runs_in,
)

Tensors = tuple[torch.Tensor, ...]


def both_signs(x: Any) -> Any:
    """Two features of each element."""
    return [where(x > 0.0, x, 0.0), where(x < 0.0, -x, 0.0)]


def standardised(x: Any) -> Any:
    """A sum that reads another one, of 24 elements."""
    centred = x - feature_sum(x) / 24.0
    return exp(centred / sqrt(feature_sum(centred * centred) / 24.0 + 0.1))


def unit_length(x: Any) -> Any:
    """A map that has no value for 0."""
    return x / sqrt(feature_sum(x * x))


@dataclass(frozen=True)
class VectorCall(LinearCall):
    """One call.

    Attributes:
        factor: what q and k are multiplied by.
        scale: of the call; None is the spec's.
    """

    factor: float = 1.0
    scale: float | None = None


def by_weights(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    matrix: torch.Tensor | None = None,
    scale: float | None = None,
    rounded: torch.dtype | None = None,
    decay: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output by its definition, with features and weights in ``rounded`` if given."""
    normaliser = spec.normaliser
    assert isinstance(normaliser, Linear)
    group = q.shape[1] // k.shape[1]
    scale = spec.qk_head_dim**-0.5 if scale is None else scale
    phi_q = _features(spec, q, matrix, scale, (-1,))
    phi_k = _features(spec, k, matrix, scale, (-2, -1))
    if rounded is not None:
        phi_q, phi_k = (x.to(rounded).to(q.dtype) for x in (phi_q, phi_k))
    weights = phi_q @ phi_k.repeat_interleave(group, 1).mT
    if is_causal(spec):
        log = (decays_of(spec, k) if decay is None else decay).double().cumsum(2)
        log = log.repeat_interleave(group, 1)
        hidden = torch.ones_like(weights, dtype=torch.bool).triu(1)
        between = (log[..., :, None] - log[..., None, :]).masked_fill(hidden, -torch.inf)
        weights = weights * torch.exp(between).to(weights.dtype)
    if ids is not None:
        seen = ids[:, :, None] == ids[:, None]
        weights = weights * (seen & (ids != -1)[:, None] if runs_in(spec).padded else seen)[:, None]
    read = weights if rounded is None else weights.to(rounded).to(q.dtype)
    acc = read @ v.repeat_interleave(group, 1)
    if not normaliser.normalise:
        return scale * acc
    sums = weights.sum(-1, keepdim=True)
    return acc / (sums if ids is None else sums.masked_fill(sums == 0.0, 1.0))


def _features(
    spec: AttentionSpec, x: Any, matrix: Any, scale: float, alike: tuple[int, ...]
) -> torch.Tensor:
    """Features, divided by the largest one over the dimensions ``alike`` where that cancels."""
    if isinstance(spec.normaliser.feature_map, Favor):
        x = x * scale**0.5
        exponents = x @ matrix.mT - (x * x).sum(-1, keepdim=True) / 2
        return torch.exp(exponents - exponents.detach().amax(alike, keepdim=True))
    return features_of(spec)(x)


def check_vectors(
    module: ModuleType, spec: AttentionSpec, call: VectorCall, device: str = "cpu"
) -> None:
    """Fails unless output and gradients are as near to float64 as torch's."""
    for name, x, right, low, size in results_of(module, spec, call, device):
        assert x.shape == right.shape, f"{name}: {tuple(x.shape)}, not {tuple(right.shape)}"
        error, allowed = error_and_bound(x, right, low, size)
        allowed *= room_on(device)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def results_of(
    module: ModuleType, spec: AttentionSpec, call: VectorCall, device: str = "cpu"
) -> Iterator[Any]:
    """(name, a module's, float64's, that of rounded features, the size of what it is made of).

    Of the output and the gradients of a call.
    """
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["USE_TMA"] = call.tma
    q, k, v, *decay = drawn_inputs(spec, call).values()
    tensors = (q * call.factor, k * call.factor, v, *decay)
    dtype = q.dtype
    drawn = (module.draw_features(1),) if spec.normaliser.feature_map.random else ()
    given = (*(in_padding(spec, call, x, torch.nan) for x in tensors[:3]), *decay)
    leaves = [x.detach().to(device).requires_grad_() for x in given]
    options: dict[str, Any] = {} if call.scale is None else {"scale": call.scale}
    options |= run_arguments(spec, call, device)
    options |= {"decay": leaves[3]} if decay else {}
    out = module.attention(*leaves[:3], *(x.to(device) for x in drawn), **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad_out = in_padding(spec, call, grad, torch.nan).to(device)
    mine = (out, *torch.autograd.grad(out, leaves, grad_out))
    mine = tuple(x.detach().cpu() for x in mine)
    exact, rough = (
        _with_gradients(spec, tensors, drawn, call, grad, *types)
        for types in ((torch.float64, None), (torch.float32, dtype))
    )
    names = ("out", "dq", "dk", "dv", *["gradient of decays"] * len(decay))
    slopes = _sizes_of_slopes(spec, tensors, drawn, call, grad) if drawn and call.factor > 1 else {}
    for name, x, right, low in zip(names, mine, exact, rough, strict=True):
        # Gradients of decays are differences of sums of these.
        size = slopes.get(name, 0.0)
        if name == "gradient of decays":
            size = (v * mine[3]).abs().sum((2, 3)).max().item()
        yield name, x, right.detach(), low.detach(), size


def _sizes_of_slopes(
    spec: AttentionSpec, tensors: Tensors, drawn: Tensors, call: VectorCall, grad: torch.Tensor
) -> dict[str, float]:
    """The size of what gradients of long vectors are made of, with random features.

    One key has nearly all of a row's weight, so that its slopes, differences of products of the
    output's gradient, are near 0; an exponent changes by the vector itself, which is long.
    """
    q, k, v, grad = (x.double() for x in (*tensors[:3], grad))
    group, scale = q.shape[1] // k.shape[1], spec.qk_head_dim**-0.5
    scale = scale if call.scale is None else call.scale
    given = (spec, q, k), (drawn[0].double(), call.scale, None, None, drawn_ids(spec, call))
    each_key = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    weights, out = (by_weights(*given[0], x, *given[1]) for x in (each_key, v))
    products = (grad @ v.repeat_interleave(group, 1).mT).abs()
    products = weights * (products + (grad * out).sum(-1, keepdim=True).abs())
    of_keys = products.sum(-2).unflatten(1, (-1, group)).sum(2)

    def changes(x: torch.Tensor) -> torch.Tensor:
        """By how much an exponent changes with an element of a vector, at most."""
        return scale**0.5 * (drawn[0].double() - scale**0.5 * x[..., None, :]).abs().amax((-1, -2))

    sizes = {"dq": products.sum(-1) * changes(q), "dk": of_keys * changes(k)}
    return {name: size.max().item() for name, size in sizes.items()}


def _with_gradients(
    spec: AttentionSpec,
    tensors: Tensors,
    drawn: Tensors,
    call: VectorCall,
    grad: torch.Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype | None,
) -> Tensors:
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    matrix = drawn[0].to(dtype) if drawn else None
    ids, decay = drawn_ids(spec, call), leaves[3] if len(leaves) > 3 else None
    out = by_weights(spec, *leaves[:3], matrix, call.scale, rounded, decay, ids)
    grads = torch.autograd.grad(out, leaves, grad.to(dtype))
    found = (out, *grads)
    return found if rounded is None else (*(x.to(rounded) for x in found[:4]), *found[4:])


def digest_of(matrix: torch.Tensor) -> str:
    """The bits of a matrix, as a number to compare."""
    bits = matrix.contiguous().view(torch.int32 if matrix.dtype == torch.float32 else torch.int16)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def check_call(
    module: ModuleType, spec: AttentionSpec, call: LinearCall, device: str = "cpu"
) -> None:
    """Fails unless results and gradients are near to float64's, those of states too."""
    if isinstance(call, VectorCall):
        check_vectors(module, spec, call, device)
    else:
        check_linear(module, spec, call, device)
