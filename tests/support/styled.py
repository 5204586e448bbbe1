"""A model with a `ContextParallelStyle`: what ranks run, and what is right."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from flashgen.distributed import ContextParallelStyle
from support.sharded import module_in

LENGTH, WIDTH, HEADS, DIM = 50, 24, 2, 16


class Attend(nn.Module):
    """A generated module's attention."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.module = module_in(path)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **parameters: Any
    ) -> torch.Tensor:
        lengths = dict.fromkeys(self.module.MESH["whole_lengths"], q.shape[2])
        out: torch.Tensor = self.module.attention(q, k, v, **parameters, **lengths)
        return out


class Layer(nn.Module):
    """Attention between projections, and what it is added to."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.attend = Attend(path)
        self.sinks = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS))
        self.to_out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        out = self.attend(q, k, v, document_ids=document_ids, sinks=self.sinks)
        return x + self.to_out(out.transpose(1, 2).flatten(2)).tanh()


def _model(path: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList(Layer(path) for _ in range(2))})


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(LENGTH, dtype=torch.int32)[None] // 17


def _loss(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model["layers"]:
        x = layer(x, ids)
    return x.square().sum()


def gradients_of_one(path: str) -> dict[str, torch.Tensor]:
    """The gradients of all parameters by one process."""
    model = _model(path)
    _loss(model, *_batch()).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def gradients_of_ranks(path: str, whole: bool, backend: str) -> dict[str, torch.Tensor]:
    """The same with FSDP2, activation checkpoints and torch.compile, on the ranks that run this."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallelStyle(module_in(path), whole=whole, balance=2)
    model: Any = parallelize_module(_model(path), mesh["cp"], {"layers.*.attend": style})
    layers = model["layers"]
    for number, layer in enumerate(layers):
        if backend:
            layer.compile(backend=backend)
        layers[number] = checkpoint_wrapper(layer)
        fully_shard(layers[number], mesh=mesh)
    x, ids = _batch()
    if whole:
        # All ranks compute the same but for attention.
        _loss(model, x, ids).backward()
    else:
        part = style.attend.shard(x, 1, document_ids=ids)
        # The mean of the ranks' gradients is taken, and the loss is a sum.
        (_loss(model, part, ids) * dist.get_world_size()).backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): x.grad.full_tensor()
        for name, x in model.named_parameters()
    }


def refused_style(path: str) -> list[str]:
    """What is said of a style that is used otherwise, on the ranks that run this."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    style = ContextParallelStyle(module_in(path))
    found = []
    for use in (
        lambda: style.attend,
        lambda: parallelize_module(_model(path), mesh["cp"], {"layers.*": style}),
        lambda: parallelize_module(_model(path), mesh["cp"], {"layers.*.attend": style}),
        lambda: parallelize_module(_model(path), mesh["dp"], {"layers.*.attend": style}),
    ):
        try:
            use()
            found.append("")
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
