"""The tensors for timing kernels, and the FLOPs of the mask's visible elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashgen.block_lists import BlockLists
from flashgen.budget.traffic import Workload
from flashgen.dropout import Seed
from flashgen.kernels.linear_workload import (
    decay_tensor,
    divides_by_signed_sums,
    heads_with_decays,
    typical_decays,
    vector_dim,
)
from flashgen.params import Int, Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.typical import (
    CHOSEN,
    DOCUMENT,
    SHARE,
    TYPICAL,
    TypicalRangeTable,
    TypicalRowTable,
    TypicalTensor,
    ids_of,
    typical_number,
)
from flashgen.reference import visibility
from flashgen.symbols import evaluate

if TYPE_CHECKING:
    import torch

# A training step's worth of tokens and model width, in few long sequences or in many short ones.
TOKENS = 16384
MODEL_WIDTH = 2048
LENGTHS = (2048, 16384)


def usual_lengths(plan: KernelPlan, lengths: tuple[int, ...] = LENGTHS) -> tuple[int, ...]:
    """The lengths among these that the variant takes, and the longest that its constants serve."""
    most = min(_limits(plan, "q_len", "kv_len"), default=max(lengths))
    return tuple(dict.fromkeys(min(length, most) for length in lengths))


def usual_heads(plan: KernelPlan) -> int:
    """The number of heads of the model, or the number that constants are for."""
    usual = min(_limits(plan, "num_q_heads"), default=max(1, MODEL_WIDTH // plan.spec.qk_head_dim))
    return heads_with_decays(plan, usual)


def _limits(plan: KernelPlan, *names: str) -> list[int]:
    numbers = {p.name: typical_number(p) for p in plan.params if isinstance(p, Int)}
    limits = (limit for constant in plan.spec.constants for limit in constant.limits)
    return [evaluate(size.sym, numbers) for name, size in limits if name in names]


def typical_params(plan: KernelPlan, q: torch.Tensor) -> dict[str, Any]:
    """A value for each run-time parameter of a call with q and as many keys; see `typical`."""
    ids = ids_of(plan.predicate.expr)
    found: dict[str, Any] = {
        param.name: _tensor(param, q, ids=param.name in ids)
        if isinstance(param, Tensor | Seed)
        else typical_number(param)
        for param in plan.params
    }
    if (decay := decay_tensor(plan)) in found:
        found[decay] = typical_decays(found[decay])
    return found


def _tensor(declared: Tensor | Seed, q: torch.Tensor, *, ids: bool) -> torch.Tensor:
    import torch

    if isinstance(declared, Seed):
        return torch.zeros(1, device=q.device, dtype=torch.int64)
    batch, heads, length, _ = q.shape
    sizes: dict[str, Any] = {"batch": batch, "num_q_heads": heads, "num_kv_heads": heads}
    sizes |= {"q_len": length, "kv_len": length}
    # An Int that a size depends on is what the call says it is.
    params = [p for dim in declared.dims if dim is not None for p in dim.params]
    sizes |= {p.name: typical_number(p) for p in params if isinstance(p, Int)}
    shape = [2 * length if dim is None else evaluate(dim.sym, sizes) for dim in declared.dims]
    generator = torch.Generator(q.device).manual_seed(0)
    if isinstance(declared, BlockLists):
        return _lists(declared, shape, generator)
    if declared.sorted or ids:
        documents = torch.arange(shape[-1], device=q.device, dtype=torch.int32) // DOCUMENT
        return documents.expand(shape).contiguous()
    if declared.dtype == "bool":
        return torch.rand(shape, device=q.device, generator=generator) < SHARE
    if declared.dtype == "int32":
        return torch.full(shape, TYPICAL, device=q.device, dtype=torch.int32)
    numbers = 0.1 * torch.randn(shape, device=q.device, generator=generator)
    return numbers.to(getattr(torch, declared.dtype))


def _lists(declared: BlockLists, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """The last block before a list's last query, and some before it: `CHOSEN` in all."""
    import torch

    lots = torch.rand(shape, device=generator.device, generator=generator)
    own, blocks = (torch.arange(n, device=generator.device) for n in shape[-2:])
    own = ((own + 1) * declared.query_block - 1) // declared.block
    own = own.clamp(max=shape[-1] - 1)[:, None]
    lots = torch.where(blocks == own, 2.0, lots).masked_fill(blocks > own, -1.0)
    best, index = lots.topk(min(CHOSEN, shape[-1]), -1)
    return index.masked_fill(best < 0, -1).int()


def random_inputs(plan: KernelPlan, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal random q, k and v of a call on the GPU: about TOKENS tokens in sequences of a length.

    Where sums of signed weights would divide, q and k have no negative element.
    """
    import torch

    heads = usual_heads(plan)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(head_dim: int) -> torch.Tensor:
        shape = (TOKENS // length, heads, length, head_dim)
        values = torch.randn(shape, device="cuda", generator=generator)
        return values.to(getattr(torch, plan.torch_dtype))

    qk_dim = vector_dim(plan)
    q, k, v = normal(qk_dim), normal(qk_dim), normal(plan.v_head_dim)
    return (q.abs(), k.abs(), v) if divides_by_signed_sums(plan) else (q, k, v)


def visible(plan: KernelPlan, q: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """The mask for q and keys of the same length; broadcasts to (batch, heads, seq, seq).

    With Linformer, for the projected keys.
    """
    batch, heads, length, _ = q.shape
    keys = plan.spec.linformer or length
    return visibility(plan.spec.mask, batch, heads, length, keys, params=params, device=q.device)


def visible_flops(plan: KernelPlan, q: torch.Tensor, seen: torch.Tensor) -> float:
    """FLOPs of both products over the elements that `visible` shows, of all heads."""
    batch, heads, length, _ = q.shape
    # Dimensions that the mask does not depend on are broadcast, not there.
    copies = batch * heads * length * (plan.spec.linformer or length) // math.prod(seen.shape)
    return 2.0 * copies * int(seen.sum()) * (plan.qk_head_dim + plan.v_head_dim)


def typical_workload(plan: KernelPlan, length: int) -> Workload:
    """Self-attention of a training step in sequences of one length."""
    heads = usual_heads(plan)
    ids = ids_of(plan.predicate.expr)
    values: dict[str, Any] = {
        param.name: TypicalTensor(param, param.name in ids)
        if isinstance(param, Tensor)
        else typical_number(param)
        for param in plan.params
    }
    values |= {constant.name: constant.elements for constant in plan.spec.constants}
    values |= {table.name: TypicalRowTable(table.side) for table in plan.row_tables}
    values |= {table.name: TypicalRangeTable(length, whole=True) for table in plan.range_tables}
    return Workload(TOKENS // length, heads, heads, length, length, tuple(values.items()))
