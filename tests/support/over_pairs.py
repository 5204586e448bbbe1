"""Calls of linear attention over all pairs, and what is right for them, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashgen import AttentionSpec, Tensor
from flashgen.normalisers import Linear
from flashgen.reference import attention_reference
from support.oracle import error_and_bound

DECAY = Tensor("decay", ("batch", "num_kv_heads", "kv_len"))
GATE = Tensor("gate", ("batch", "kv_len"), "int32")
DENSE = Tensor("dense", ("q_len", "kv_len"), "bool")


def pasted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask that data decides, under which some queries see no key."""
    return (q_idx - kv_idx < 9) & (kv_idx <= q_idx) & (GATE[b, kv_idx] > 1)


def dense(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask that hides whole tiles of 64 x 64, of some queries not the first that they visit."""
    return DENSE[q_idx, kv_idx]


@dataclass(frozen=True)
class PairCall:
    """One call.

    Attributes:
        hidden: whether some positions have the id -1, and NaN in their rows of q, k and v.
        steep: whether some decays of keys are 0 or nearly 0, others small.
    """

    q_len: int
    kv_len: int
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    hidden: bool = False
    steep: bool = False


def arguments(module: ModuleType, spec: AttentionSpec, call: PairCall) -> dict[str, torch.Tensor]:
    """What the mask, decays and random features read, by name."""
    normaliser, found = spec.normaliser, {}
    assert isinstance(normaliser, Linear)
    generator = torch.Generator().manual_seed(2)
    names = [param.name for param in spec.mask.params]
    if "gate" in names:
        found["gate"] = torch.randint(0, 3, (call.batch, call.kv_len), generator=generator).int()
    if "dense" in names:
        found["dense"] = torch.ones(call.q_len, call.kv_len, dtype=torch.bool)
        found["dense"][:64, 64:128] = found["dense"][64:128, 128:] = False
    if "document_ids" in names:
        ids = (torch.arange(call.kv_len) // 9).int().repeat(call.batch, 1)
        found["document_ids"] = ids.masked_fill(padding(call), -1)
    if normaliser.decay is not None and normaliser.decay.tensor is not None:
        sizes = (call.batch, call.kv_heads, call.kv_len)
        decay = -torch.rand(sizes, generator=generator)
        if call.steep:
            decay[0, 0, 10], decay[:, 1, 5:20] = -torch.inf, -30.0
        found["decay"] = decay
    if normaliser.feature_map.random:
        found["matrix"] = module.draw_features(0, device="cpu")
    return found


def padding(call: PairCall) -> torch.Tensor:
    """Positions that are hidden, (batch, kv_len): at one end or the other."""
    hidden = torch.zeros(call.batch, call.kv_len, dtype=torch.bool)
    hidden[0, -7:], hidden[1:, :5] = call.hidden, call.hidden
    return hidden


def check_pairs(
    module: ModuleType, spec: AttentionSpec, call: PairCall, device: str = "cpu"
) -> None:
    """Fails unless results and gradients are as near to float64 as torch's, twice over.

    On a GPU, whose products add up in another order, four times over.
    """
    generator = torch.Generator().manual_seed(0)
    own = getattr(torch, spec.dtype)

    def drawn(heads: int, length: int, dim: int) -> torch.Tensor:
        # Heads inside of the rows: strides are others than those of features.
        x = torch.randn(call.batch, length, heads, dim, generator=generator)
        return x.transpose(1, 2).to(own).float()

    normaliser = spec.normaliser
    assert isinstance(normaliser, Linear)
    q = drawn(call.q_heads, call.q_len, spec.qk_head_dim)
    if not normaliser.normalise:
        q[:, 0, 3] = 0.0  # weights of 0 have gradients
    k = drawn(call.kv_heads, call.kv_len, spec.qk_head_dim)
    v = drawn(call.kv_heads, call.kv_len, spec.v_head_dim)
    given = arguments(module, spec, call)
    learned = ["decay"] * ("decay" in given)
    has_lse = normaliser.normalise and normaliser.feature_map.never_negative
    has_lse &= not normaliser.feature_map.random
    names = ["out"] + ["lse"] * has_lse
    names += [f"gradient of {x}" for x in ("q", "k", "v", *learned)]
    grads: list[torch.Tensor] = []

    def found(run: Callable[..., Any], dtype: torch.dtype, nan: bool = False) -> list[torch.Tensor]:
        tensors = [x.to(dtype) for x in (q, k, v)]
        tensors += [given[x].to(torch.promote_types(dtype, torch.float32)) for x in learned]
        if nan:
            hidden = padding(call)[:, None, :, None]
            tensors[:3] = (x.masked_fill(hidden, torch.nan) for x in tensors[:3])
        leaves = [x.detach().requires_grad_() for x in tensors]
        results = list(run(*leaves[:3], given | dict(zip(learned, leaves[3:], strict=True))))
        results = results[: 1 + has_lse]
        if not grads:
            grads.extend(torch.randn(x.shape, generator=generator) for x in results)
            grads[0] = grads[0].to(own).float()
        # A sum of 0 has no gradient.
        shown = [torch.where(x.isinf(), 0.0, x) for x in results]
        wanted = [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
        return [*results, *torch.autograd.grad(shown, leaves, wanted)]

    def mine(q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        q, k, v, *rest = (x.to(device) for x in (q, k, v, *more.values()))
        more = dict(zip(more, rest, strict=True))
        matrix = (more.pop("matrix"),) if "matrix" in more else ()
        got = module.attention(q, k, v, *matrix, **more, return_lse=has_lse)
        return [x.cpu() for x in got] if has_lse else (got.cpu(),)

    def right(q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        return attention_reference(
            q, k, v, spec.mask, normaliser=normaliser, params=more, dtype=q.dtype, return_lse=True
        )

    exact, rough = (found(right, dtype) for dtype in (torch.float64, own))
    times = 2 if device == "cpu" else 4
    for name, x, of_exact, of_rough in zip(
        names, found(mine, own, call.hidden), exact, rough, strict=True
    ):
        assert x.shape == of_exact.shape, f"{name}: {tuple(x.shape)}"
        none = of_exact.isinf()
        assert torch.equal(x.isinf(), none), f"{name}: error of what has no key"
        x, of_exact, of_rough = (y.masked_fill(none, 0.0) for y in (x, of_exact, of_rough))
        error, allowed = error_and_bound(x.detach(), of_exact.detach(), of_rough.detach())
        bound = times * allowed
        if learned:  # torch's own products of steep decays are far off in 16 bits
            bound = min(bound, float(of_exact.detach().abs().max()) / 64)
        assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"
