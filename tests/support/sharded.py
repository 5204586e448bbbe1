"""Calls that are computed by several ranks, and by one: what ranks run, and what is right."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import flashgen.distributed.plan as plans
from flashgen.distributed import Machine, context_parallel
from flashgen.distributed.agreement import Disagreement
from support.source_lines import quick_inspect

#: Keys between runs from which on they are calls of their own: cases are short.
GAP = 4


@dataclass(frozen=True)
class Sharded:
    """A call of a whole.

    Attributes:
        module: the file of its module.
        tensors: q, k, v, and the gradient of the output.
        parameters: those of the call, without lengths and offsets.
        balance: of `context_parallel`.
        strategy: likewise.
        parts: likewise.
        keep: likewise.
        again: whether the backward pass computes again what the forward pass has saved.
        mesh: None, or the sizes of a mesh of which the call gets DTensors: ranks of its last
            dimension have the sequence.
        beside: the placement of q, k and v over the mesh's other dimension.
        reduce_learned: of `context_parallel`; DTensors are whole in the end either way.
    """

    module: str
    tensors: tuple[torch.Tensor, ...]
    parameters: dict[str, Any]
    balance: str | int = "auto"
    strategy: str = "all-to-all"
    parts: int | None = None
    keep: bool | None = None
    again: bool = False
    mesh: tuple[int, ...] | None = None
    beside: Placement = field(default_factory=Replicate)
    reduce_learned: bool = True

    @property
    def length(self) -> int:
        """Of the whole."""
        return self.tensors[0].shape[2]


@cache
def module_in(path: str) -> ModuleType:
    """The module in a file."""
    spec = spec_from_file_location("sharded", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with quick_inspect(Path(path)):
        spec.loader.exec_module(module)
    return module


def by_one(call: Sharded, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients by one process; with a dtype, by the module's reference in it."""
    module = module_in(call.module)
    *given, grad_out = (x.detach().to(dtype or x.dtype) for x in call.tensors)
    given = [x.requires_grad_() for x in given]
    parameters = _leaves(call.parameters, dtype)
    lengths = dict.fromkeys(module.MESH["whole_lengths"], call.length)
    attention = module.attention if dtype is None else module.reference
    out = attention(*given, **parameters, **lengths)
    out.backward(grad_out)
    return _named(out, given, parameters)


def by_ranks(call: Sharded) -> dict[str, torch.Tensor]:
    """The same by the ranks that run this, on each the whole."""
    plans.GAP = GAP
    warnings.simplefilter("ignore")
    if call.mesh is not None:
        return _by_dtensors(call, call.mesh)
    module = module_in(call.module)
    attend = context_parallel(
        module,
        balance=call.balance,
        strategy=call.strategy,
        parts=call.parts,
        keep=call.keep,
    )
    parameters = _leaves(call.parameters, None)
    read = {name: parameters[name] for name in module.MESH["of_runs"] if name in parameters}
    *given, grad_out = (attend.shard(x, 2, **read) for x in call.tensors)
    given = [x.detach().requires_grad_() for x in given]
    if call.again:
        out = checkpoint(attend, *given, **parameters, use_reentrant=False)
    else:
        out = attend(*given, **parameters)
    out.backward(grad_out)
    named = _named(out, given, parameters)
    for name in ("out", "q", "k", "v"):
        named[name] = attend.unshard(named[name], 2)
    return named


def _by_dtensors(call: Sharded, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same of DTensors, whose whole has the positions in the order of `shard`."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")[-len(sizes) :])
    module = module_in(call.module)
    attend = context_parallel(
        module, mesh["cp"], balance=call.balance, reduce_learned=call.reduce_learned
    )
    of_batch = call.beside if call.beside == Shard(0) else Replicate()
    of_ids = (of_batch, Replicate())[-len(sizes) :]
    parameters = {
        name: distribute_tensor(x, mesh, of_ids if "ids" in name else None)
        if isinstance(x, torch.Tensor)
        else x
        for name, x in _leaves(call.parameters, None).items()
    }
    layout = attend.layout(call.length, **{n: call.parameters[n] for n in module.MESH["of_runs"]})
    order = torch.cat([layout.positions(rank) for rank in range(layout.ranks)])
    placements = (call.beside, Shard(2))[-len(sizes) :]
    *given, grad_out = (distribute_tensor(x[:, :, order], mesh, placements) for x in call.tensors)
    given = [x.requires_grad_() for x in given]
    out = attend(*given, **parameters)
    out.backward(grad_out)
    named = _named(out, given, parameters)
    assert all(named[name].placements == placements for name in ("out", "q", "k", "v"))
    whole = {name: x.full_tensor() for name, x in named.items()}
    return {n: x[:, :, order.argsort()] if n in ("out", *"qkv") else x for n, x in whole.items()}


def refused_dtensors(path: str) -> list[str]:
    """What is said of DTensors that a call cannot take, on the ranks that run this."""
    whole, across = (
        init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")) for sizes in ((1, 2), (2, 1))
    )
    attend = context_parallel(module_in(path), whole["cp"], balance="contiguous")
    x = torch.zeros(2, 2, 32, 16)

    def of(*placements: Placement, mesh: Any = whole, length: int = 32) -> Any:
        return distribute_tensor(x[:, :, :length], mesh, placements)

    right = of(Replicate(), Shard(2))
    bias = distribute_tensor(torch.zeros(2, 32), whole, (Replicate(), Shard(1)))
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (of(Replicate(), Replicate()), of(Replicate(), Replicate()), {}),
        (of(Replicate(), Shard(1)), of(Replicate(), Shard(1)), {}),
        (right, of(Replicate(), Replicate()), {}),
        (right, x[:, :, :16], {}),
        (of(Shard(2), Shard(2)), of(Shard(2), Shard(2)), {}),
        (of(Shard(2), mesh=across["cp"]), of(Shard(2), mesh=across["cp"]), {}),
        (of(Shard(1), Shard(2)), of(Shard(1), Shard(2)), {}),
        (of(Replicate(), Shard(2), length=31), of(Replicate(), Shard(2), length=31), {}),
        (right, right, {"bias": bias}),
    ]
    found = []
    for q, k, parameters in calls:
        try:
            attend(q, k, k, **parameters)
        except Disagreement as error:
            found.append(str(error))
    return found


def drawn_seed(path: str) -> dict[str, torch.Tensor]:
    """Output and gradient of a checkpointed call whose seed is drawn by the ranks that run this."""
    warnings.simplefilter("ignore")
    attend = context_parallel(module_in(path), balance=2)
    torch.manual_seed(dist.get_rank())
    whole = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    q = attend.shard(whole, 2).requires_grad_()
    out = checkpoint(lambda x: attend(x, x, x, dropout_p=0.5), q, use_reentrant=False)
    out.sum().backward()
    assert q.grad is not None
    assert len(attend._strategies) == 1, "one strategy with the seed, and one without"
    return {"whole": whole, "out": attend.unshard(out.detach(), 2), "q": attend.unshard(q.grad, 2)}


def by_all(calls: list[Sharded]) -> list[dict[str, torch.Tensor] | str]:
    """What `by_ranks` returns of each call, an error as its text."""
    found: list[dict[str, torch.Tensor] | str] = []
    for call in calls:
        try:
            found.append(by_ranks(call))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def round_trips(path: str) -> list[str]:
    """What is wrong with shards of a batch with documents, on the ranks that run this."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    attend, rank = context_parallel(module_in(path), mesh["cp"], balance=3), dist.get_rank()
    ids = torch.arange(50, dtype=torch.int32)[None] // 9
    tokens = torch.arange(100).reshape(2, 50)
    shard = attend.shard(tokens, 1, document_ids=ids)
    labels = attend.shard(tokens.float().reshape(2, 1, 50, 1) / 2, -2)
    found = []
    positions = attend.layout(50, document_ids=ids).positions(rank)
    found.append("" if torch.equal(shard, tokens[:, positions]) else "positions differ")
    same = torch.equal(attend.unshard(labels, 2), tokens.reshape(2, 1, 50, 1) / 2)
    found.append("" if same and torch.equal(labels[:, 0, :, 0], shard / 2) else "wholes differ")
    try:
        attend.unshard(labels.requires_grad_(), 2)
    except RuntimeError as error:
        found.append(str(error))
    return found


def shown_plan(path: str) -> str:
    """The text of a plan, of the ranks that run this."""
    attend = context_parallel(module_in(path), machine=Machine())
    return str(attend.plan(4096, num_q_heads=8, num_kv_heads=2))


def problems_of(path: str, differences: dict[str, list[Any]]) -> str:
    """The error of a call with what differs on the ranks that run this; ``""`` for none."""
    rank = dist.get_rank()
    mine = {name: each[rank] for name, each in differences.items()}
    warnings.simplefilter("ignore")
    attend = context_parallel(module_in(path), balance=2, timeout=timedelta(seconds=1))
    attend.shard(torch.zeros(16), 0)
    if mine.get("silent"):
        return ""
    tokens, heads = mine.get("tokens", 8), mine.get("heads", 4)
    q, k, v = (torch.zeros(2, n, tokens, 16) for n in (heads, 2, 2))
    k.requires_grad_(mine.get("gradients", False))
    try:
        attend(q, k, v, scale=mine.get("scales"), **mine.get("parameters", {}))
    except Disagreement as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _leaves(parameters: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().to(dtype or x.dtype).clone().requires_grad_()
        return x

    return {name: leaf(x) for name, x in parameters.items()}


def _named(
    out: torch.Tensor, given: list[torch.Tensor], parameters: dict[str, Any]
) -> dict[str, torch.Tensor]:
    named = {"out": out.detach(), **dict(zip("qkv", (x.grad for x in given), strict=True))}
    learned = {n: x.grad for n, x in parameters.items() if getattr(x, "requires_grad", False)}
    return named | learned
