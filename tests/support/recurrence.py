"""Linear attention by its definition, a recurrence over keys, and calls to try kernels with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec
from flashgen.normalisers import Linear
from flashgen.plan.linear import LINEAR_MASKS
from flashgen.symbolic import trace
from support.oracle import error_and_bound

Tensors = tuple[torch.Tensor, ...]

#: The feature maps that ship, as torch has them.
MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity()": lambda x: x,
    "relu()": torch.relu,
    "elu_plus_one()": lambda x: torch.nn.functional.elu(x) + 1.0,
}


@dataclass(frozen=True)
class LinearCall:
    """One call of a variant of linear attention.

    Attributes:
        strided: whether q, k and v are views into tensors with the heads inside of the rows.
        tma: whether tiles are copied by TMA.
    """

    q_len: int
    kv_len: int
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    strided: bool = False
    tma: bool = True


def is_causal(spec: AttentionSpec) -> bool:
    """Whether a query sees the keys up to its own position, else all."""
    return bool(trace(spec.mask).expr == LINEAR_MASKS[0])


def features_of(spec: AttentionSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The feature map, in torch."""
    normaliser = spec.normaliser
    assert isinstance(normaliser, Linear)
    feature_map = normaliser.feature_map
    return MAPS.get(feature_map.label, feature_map.function)


def recurrence(spec: AttentionSpec, q: Any, k: Any, v: Any) -> Tensors:
    """(out, sums of weights without the scale) key by key: the definition.

    A state is the sum of features times values, and a total that of features.
    """
    phi_q, phi_k, v = _features(spec, q, k, v)
    state = phi_q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    total = phi_q.new_zeros(*q.shape[:2], q.shape[3])
    causal = is_causal(spec)
    outs, sums = [], []
    for n in range(k.shape[2]):
        state = state + phi_k[:, :, n, :, None] * v[:, :, n, None, :]
        total = total + phi_k[:, :, n]
        if causal:
            outs.append((phi_q[:, :, n, None] @ state).squeeze(2))
            sums.append((phi_q[:, :, n] * total).sum(-1))
    acc = torch.stack(outs, 2) if causal else phi_q @ state
    of_weights = torch.stack(sums, 2) if causal else (phi_q @ total[..., None]).squeeze(-1)
    return _finished(spec, acc, of_weights), of_weights


def quadratic(spec: AttentionSpec, q: Any, k: Any, v: Any) -> Tensors:
    """The same by all weights, with features and weights in the inputs' dtype, in float32 sums."""
    dtype = q.dtype
    phi_q, phi_k, v = _features(spec, q.float(), k.float(), v.float())
    phi_q, phi_k = (x.to(dtype).float() for x in (phi_q, phi_k))
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if is_causal(spec) else weights
    sums = weights.sum(-1)
    return _finished(spec, weights.to(dtype).float() @ v, sums).to(dtype), sums


def _features(spec: AttentionSpec, q: Any, k: Any, v: Any) -> Tensors:
    group = q.shape[1] // k.shape[1]
    phi = features_of(spec)
    return phi(q), phi(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _finished(spec: AttentionSpec, acc: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    if not spec.normaliser.normalise:
        return acc * spec.qk_head_dim**-0.5
    empty = (sums == 0)[..., None]
    return (acc / sums[..., None].masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def check_linear(module: ModuleType, spec: AttentionSpec, call: LinearCall) -> None:
    """Fails unless output, LSE and gradients are as near to float64 as torch's, twice over."""
    for table in (module.CONFIGS, module.CONFIGS_OF_GRADIENTS):
        for config in table.values():
            config["USE_TMA"] = call.tma
    tensors = drawn_inputs(spec, call)
    has_lse = spec.normaliser.normalise and spec.normaliser.feature_map.never_negative
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    got = module.attention(q, k, v, return_lse=has_lse)
    got = got if has_lse else (got,)
    generator = torch.Generator().manual_seed(1)
    grads = tuple(torch.randn(x.shape, generator=generator).to(x.dtype) for x in got)
    exact = _with_gradients(recurrence, spec, [x.double() for x in tensors], grads)
    rough = _with_gradients(quadratic, spec, tensors, grads)
    mine = (*got, *torch.autograd.grad(got, (q, k, v), grads))
    names = ("out", "lse", "dq", "dk", "dv") if has_lse else ("out", "dq", "dk", "dv")
    for name, x, right, low in zip(names, mine, exact, rough, strict=True):
        assert x.shape == right.shape, f"{name}: {tuple(x.shape)}, not {tuple(right.shape)}"
        error, allowed = error_and_bound(x.detach(), right.detach(), low.detach())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _with_gradients(run: Any, spec: AttentionSpec, tensors: Any, grads: Tensors) -> Tensors:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, sums = run(spec, *leaves)
    results = (out, torch.log(sums * spec.qk_head_dim**-0.5))[: len(grads)]
    given = tuple(g.to(x.dtype) for g, x in zip(grads, results, strict=True))
    return (*results, *torch.autograd.grad(results, leaves, given))


def drawn_inputs(spec: AttentionSpec, call: LinearCall) -> Tensors:
    """q, k and v of a call."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)

    def drawn(heads: int, length: int, dim: int) -> torch.Tensor:
        shape = (call.batch, heads, length, dim)
        if not call.strided:
            return torch.randn(shape, generator=generator).to(dtype)
        rows = torch.randn(call.batch, length, heads, dim, generator=generator).to(dtype)
        return rows.transpose(1, 2)

    return (
        drawn(call.q_heads, call.q_len, spec.qk_head_dim),
        drawn(call.kv_heads, call.kv_len, spec.qk_head_dim),
        drawn(call.kv_heads, call.kv_len, spec.v_head_dim),
    )
