"""What `flashgen bench` compares linear attention and Linformer with: softmax, fla, a copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashgen.feature_maps import elu_plus_one, identity, relu
from flashgen.kernels.linear_workload import declared
from flashgen.normalisers import softmax
from flashgen.plan import KernelPlan, lower
from flashgen.plan.linear import LinearPlan
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

    Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: Elements of the tensor that is copied to measure the bandwidth.
COPIED = 2**29

#: fla's function of a variant, as users call it, with the feature map before it.
FLA = "fla"


def softmax_of(spec: AttentionSpec, name: str) -> KernelPlan:
    """The plan of softmax attention with the mask of a spec, to all keys."""
    return lower(replace(spec, normaliser=softmax(), linformer=None), name)


def copied_bytes(timed: Callable[[Callable[[], Any]], float], device: torch.device) -> float:
    """The bytes that a copy reads and writes in a millisecond."""
    import torch

    source = torch.empty(COPIED, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def moved_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """The bytes of q, k and v, each read once, and of the output, written once."""
    out = q.numel() // q.shape[3] * v.shape[3] * q.element_size()
    return int(q.nbytes + k.nbytes + v.nbytes + out)


def fla_call(
    plan: KernelPlan, inputs: Inputs, keywords: dict[str, Any]
) -> Callable[[], Any] | None:
    """The function of fla for a variant, on these inputs; None if it is not installed, or has none.

    Its tensors have tokens before heads, and are made beforehand.

    Args:
        plan: of the variant.
        inputs: q, k and v.
        keywords: what a call of the variant passes by keyword, decays among it.
    """
    if importlib.util.find_spec(FLA) is None or not plan.linear:
        return None
    import torch.nn.functional as F

    linear = LinearPlan(plan)
    maps: dict[str, Callable[[Any], Any]] = {
        identity().canonical: lambda x: x,
        relu().canonical: F.relu,
        elu_plus_one().canonical: lambda x: F.elu(x) + 1,
    }
    of = declared(plan)
    assert of is not None
    feature_map = None if linear.matrices else maps.get(of.feature_map.canonical)
    if feature_map is None or not linear.causal or linear.runs is not None:
        return None
    if linear.has_decay and (linear.normalise or not linear.learned):
        return None
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    scale = plan.scale
    if not linear.has_decay:
        from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

        return lambda: chunk_linear_attn(
            feature_map(q), feature_map(k), v, scale=scale, normalize=linear.normalise
        )[0]
    gates = keywords[linear.decay_keyword].transpose(1, 2).contiguous()
    if linear.by_features:
        from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]

        return lambda: chunk_gla(feature_map(q), feature_map(k), v, gates, scale=scale)[0]
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    return lambda: chunk_simple_gla(feature_map(q), feature_map(k), v, gates, scale=scale)[0]
