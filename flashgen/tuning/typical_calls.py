"""What calls pass besides q, k and v, and what the dense kernels get of it, to measure both."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen.kernels.linear_workload import declared, typical_decays
from flashgen.kernels.workload import typical_params
from flashgen.plan import KernelPlan
from flashgen.plan.pair_decays import OF_REST, OF_WHOLE
from flashgen.plan.quadratic import QuadraticPlan

if TYPE_CHECKING:
    import torch

    Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def typical_call(
    plan: KernelPlan, module: ModuleType, q: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a call of `attention` with q and as many keys passes: behind v, and by keyword."""
    params = typical_params(plan, q)
    if plan.spec.linformer:
        matrix = _projection(plan, q)
        return (matrix, matrix), plan.by_keyword(params)
    if not plan.products:
        return _matrix(plan, module, q), plan.by_keyword(params)
    quadratic = QuadraticPlan(plan)
    users = {argument.name for argument in quadratic.arguments}
    keywords = plan.by_keyword({name: x for name, x in params.items() if name in users})
    if quadratic.decay_keyword:
        keywords[quadratic.decay_keyword] = _decays(q)
    return _matrix(plan, module, q), keywords


def dense_inputs(
    plan: KernelPlan, module: ModuleType, vectors: Inputs
) -> tuple[Inputs, dict[str, Any]]:
    """q, k, v and the parameters, by name, that the dense kernels get in a call with vectors.

    They are the call's own but for features over all pairs, and projected keys.
    """
    q, k, v = vectors
    params = typical_params(plan, q)
    if plan.spec.linformer:
        projection = _projection(plan, q)
        return (q, module._projected(projection, k), module._projected(projection, v)), params
    if not plan.products:
        return vectors, params
    quadratic, matrix = QuadraticPlan(plan), _matrix(plan, module, q)
    if quadratic.decay_keyword:
        params[OF_WHOLE], params[OF_REST] = module._decays_of_keys(_decays(q), q, k)
    if quadratic.random:
        q, k = (
            module._features_of(x, *matrix, plan.scale, of_rows)
            for x, of_rows in ((q, True), (k, False))
        )
    elif quadratic.mapped:
        q, k = module._features_of(q), module._features_of(k)
    return (q, k, v), params


def oracle(plan: KernelPlan) -> str:
    """The function of a module that computes in eager torch what the dense kernels do."""
    if plan.spec.linformer:
        return "_reference_of_projected"
    return "_reference_of_features" if plan.products else "reference"


def _matrix(plan: KernelPlan, module: ModuleType, q: torch.Tensor) -> tuple[Any, ...]:
    """The matrix of random features, if they are."""
    linear = declared(plan)
    random = linear is not None and linear.feature_map.random
    return (module.draw_features(0, device=q.device),) if random else ()


def _decays(q: torch.Tensor) -> torch.Tensor:
    """A decay for each key of as many heads as q has."""
    import torch

    generator = torch.Generator(q.device).manual_seed(1)
    drawn = 0.1 * torch.randn(q.shape[:3], device=q.device, generator=generator)
    return typical_decays(drawn)


def _projection(plan: KernelPlan, q: torch.Tensor) -> torch.Tensor:
    """A matrix that makes the spec's number of keys of as many as q has, for all heads."""
    import torch

    length = q.shape[2]
    assert plan.spec.linformer is not None
    shape = (1, plan.spec.linformer, length)
    generator = torch.Generator(q.device).manual_seed(1)
    drawn = torch.randn(shape, device=q.device, generator=generator)
    return drawn.mul_(1 / math.sqrt(length)).to(q.dtype)
