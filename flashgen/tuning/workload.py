"""What kernels are timed on: tensors of a training step, and the FLOPs that the mask asks for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.plan import KernelPlan
from flashgen.reference import visibility

if TYPE_CHECKING:
    import torch

# A training step's worth of tokens and model width, in few long sequences or in many short ones.
TOKENS = 16384
MODEL_WIDTH = 2048
LENGTHS = (2048, 16384)

# Parameters without a default are measured at this value, or at their minimum if that is larger.
TYPICAL_PARAM = 1024


def typical_params(plan: KernelPlan) -> dict[str, int]:
    """A value for each run-time parameter: its default, where it has one."""
    return {
        param.name: max(TYPICAL_PARAM, param.min) if param.default is None else param.default
        for param in plan.params
    }


def random_inputs(plan: KernelPlan, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal random q, k and v on the GPU: TOKENS tokens in sequences of one length."""
    import torch

    heads = max(1, MODEL_WIDTH // plan.qk_head_dim)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(head_dim: int) -> torch.Tensor:
        shape = (TOKENS // length, heads, length, head_dim)
        values = torch.randn(shape, device="cuda", generator=generator)
        return values.to(getattr(torch, plan.torch_dtype))

    return normal(plan.qk_head_dim), normal(plan.qk_head_dim), normal(plan.v_head_dim)


def visible(plan: KernelPlan, q: torch.Tensor, params: dict[str, int]) -> torch.Tensor:
    """The mask for q and keys of the same length; broadcasts to (batch, heads, seq, seq)."""
    batch, heads, length, _ = q.shape
    return visibility(plan.spec.mask, batch, heads, length, length, params=params, device=q.device)


def visible_flops(plan: KernelPlan, q: torch.Tensor, seen: torch.Tensor) -> float:
    """FLOPs of both products over the elements that `visible` shows, of all heads."""
    batch, heads, length, _ = q.shape
    # Dimensions that the mask does not depend on are broadcast, not there.
    copies = batch * heads * length * length // math.prod(seen.shape)
    return 2.0 * copies * int(seen.sum()) * (plan.qk_head_dim + plan.v_head_dim)
