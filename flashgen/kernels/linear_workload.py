"""What measuring linear attention needs to know of a plan: its heads, its vectors, its decays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.normalisers import Linear
from flashgen.plan import KernelPlan
from flashgen.plan.pairs import Products
from flashgen.symbols import H

if TYPE_CHECKING:
    import torch

#: What logarithms of sigmoids are divided by to be decays, as in gated linear attention.
SLOWER = 16.0


def declared(plan: KernelPlan) -> Linear | None:
    """What the user declared, by whichever algorithm it is computed; None for other attention."""
    normaliser = plan.spec.normaliser
    if isinstance(normaliser, Products):
        return normaliser.of
    return normaliser if isinstance(normaliser, Linear) else None


def vector_dim(plan: KernelPlan) -> int:
    """Elements of a head's query and key, as calls pass them."""
    normaliser = plan.spec.normaliser
    return normaliser.vector_dim if isinstance(normaliser, Products) else plan.qk_head_dim


def divides_by_signed_sums(plan: KernelPlan) -> bool:
    """Whether sums of weights, by which they are divided, may be near 0.

    No result is near another where they are; of vectors without a negative element most maps have
    positive features.
    """
    linear = declared(plan)
    return linear is not None and linear.normalise and not linear.feature_map.never_negative


def heads_with_decays(plan: KernelPlan, usual: int) -> int:
    """As many heads as a spec has decays of heads for, else the usual number."""
    linear = declared(plan)
    decay = None if linear is None else linear.decay
    if decay is None or decay.tensor is not None:
        return usual
    if decay.numbers:
        return len(decay.numbers)
    above = (h for h in range(usual) if not decay.traced.subs(H, h) <= 0)
    return max(1, next(above, usual))


def decay_tensor(plan: KernelPlan) -> str:
    """The parameter that has a number for each key, or each feature of one; ``""`` for none."""
    linear = declared(plan) if plan.linear else None
    tensor = None if linear is None or linear.decay is None else linear.decay.tensor
    return "" if tensor is None else tensor.name


def typical_decays(drawn: torch.Tensor) -> torch.Tensor:
    """Logarithms of decays, as gates of models have them, of normal numbers of a deviation of 0.1.

    Their middle is a factor of 0.96.
    """
    import torch

    return torch.nn.functional.logsigmoid(10.0 * drawn) / SLOWER
