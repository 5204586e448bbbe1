"""Linear attention in flashgen and in fla (flash-linear-attention), and by its recurrence.

Tensors are (batch, tokens, heads, head_dim), as fla takes them; flashgen reads the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
import torch.nn.functional as F

from benchmarks.figures import OWN
from benchmarks.peers import load_module

FLA, COMPILED, IN_PARTS, SOFTMAX = "fla", "fla, compiled", "fla, in parts", f"{OWN}, softmax"
HEADS = 16

#: Lengths at which fla is also measured under torch.compile, which takes seconds for each size.
COMPILED_LENGTHS = (2048, 131072)

#: Variants by name, with their titles.
VARIANTS = {
    "plain": "plain",
    "elu": "elu(x) + 1, normalised",
    "retention": "a decay for each head",
    "token": "decays of keys",
    "gla": "decays of features",
    "favor": "Performer, 256 features",
}

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """A variant at a size.

    Attributes:
        part: of the table: ``"grid"``, ``"cell"`` in which all ways are shown, ``"softmax"`` beside
            our own softmax attention, ``"tokens"`` for flashgen alone.
    """

    variant: str
    head_dim: int
    batch: int
    seq_len: int
    part: str = "grid"

    @property
    def title(self) -> str:
        """The variant and its size."""
        return f"{self.variant} d{self.head_dim} {self.batch} x {self.seq_len}"

    @property
    def module(self) -> str:
        """The module that computes it."""
        return f"linear_{self.variant}_d{self.head_dim}"

    @property
    def elements(self) -> int:
        """Elements of q, and as many of k, v and the output."""
        return self.batch * self.seq_len * HEADS * self.head_dim


def tensors_of(cell: Cell, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """q, k and v, and decays where there are any, which all get gradients; and one of the output.

    Decays are those of models: logarithms of sigmoids, divided by 16.
    """
    torch.manual_seed(0)
    sizes = (cell.batch, cell.seq_len, HEADS, cell.head_dim)
    q, k, v, grad = (torch.randn(sizes, dtype=torch.bfloat16, device=device) for _ in range(4))
    found = [q, k, v]
    if cell.variant in ("token", "gla"):
        gates = torch.randn(sizes[: 3 if cell.variant == "token" else 4], device=device)
        found.append(F.logsigmoid(gates) / 16)
    return tuple(x.requires_grad_() for x in found), grad


def ways(cell: Cell, device: torch.device) -> Iterator[tuple[str, Callable[[], Call]]]:
    """What computes a cell: names, with functions that load what is called."""
    yield OWN, lambda: own(cell, device)
    if cell.part == "softmax":
        yield SOFTMAX, lambda: _heads_first(load_module(f"causal_d{cell.head_dim}").attention)
    elif cell.part != "tokens":
        yield FLA, lambda: fla(cell.variant)
        if cell.variant == "elu" and cell.seq_len in COMPILED_LENGTHS:
            yield COMPILED, lambda: _compiled(fla("elu"))
            if cell.part == "cell":
                yield IN_PARTS, lambda: _compiled(fla("in parts"))


def own(cell: Cell, device: torch.device) -> Call:
    """The generated module."""
    module = load_module(cell.module)
    if cell.variant == "favor":
        matrix = module.draw_features(seed=0, device=device)
        return _heads_first(lambda q, k, v: module.attention(q, k, v, matrix))
    if cell.variant in ("token", "gla"):
        return lambda q, k, v, decay: _heads_first(
            lambda *qkv: module.attention(*qkv, decay=decay.transpose(1, 2))
        )(q, k, v)
    return _heads_first(module.attention)


def _heads_first(attention: Callable[..., Any]) -> Call:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2)

    return call


def fla(variant: str) -> Call:
    """Fla's function of a variant, as its documentation calls it."""
    from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]
    from fla.ops.linear_attn.utils import (  # type: ignore[import-not-found]
        normalize_with_z_state,
    )
    from fla.ops.retention import chunk_retention  # type: ignore[import-not-found]
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    def in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, scale = F.elu(q) + 1, F.elu(k) + 1, q.shape[-1] ** -0.5
        products, _ = chunk_simple_gla(q, k, v, scale=scale)
        out: torch.Tensor = normalize_with_z_state(products, q, k, scale, None, False, None)[0]
        return out

    found: dict[str, Call] = {
        "in parts": in_parts,
        "plain": lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0],
        "elu": lambda q, k, v: chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, normalize=True)[0],
        "retention": lambda q, k, v: chunk_retention(q, k, v)[0],
        "token": lambda q, k, v, g: chunk_simple_gla(q, k, v, g)[0],
        "gla": lambda q, k, v, g: chunk_gla(q, k, v, g)[0],
    }
    return found[variant]


def _compiled(call: Call) -> Call:
    """A call under torch.compile, with kernels for each size.

    fla takes its functions out of compiling, which leaves maps of features.
    """
    torch._dynamo.config.recompile_limit = 64
    compiled: Call = torch.compile(call, dynamic=False)
    return compiled


def exact(cell: Cell, inputs: Tensors) -> torch.Tensor:
    """The output by the recurrence, one token after the other; differentiable, in any dtype."""
    q, k, v = inputs[:3]
    if cell.variant == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    heads = torch.arange(HEADS, dtype=q.dtype, device=q.device)
    decay = {
        "retention": lambda: torch.log(1 - torch.exp2(-5 - heads))[:, None],
        "token": lambda: inputs[3][..., None],
        "gla": lambda: inputs[3],
    }.get(cell.variant, lambda: torch.zeros_like(q[..., :1]))()
    kept = decay.exp().expand(*q.shape[:3], -1)
    state = torch.zeros_like(q[:, 0, :, :, None] * v[:, 0, :, None, :])
    sums, outs = torch.zeros_like(k[:, 0]), []
    for t in range(q.shape[1]):
        state = kept[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        sums = kept[:, t] * sums + k[:, t]
        out = (q[:, t, :, None, :] @ state).squeeze(-2)
        if cell.variant == "elu":
            outs.append(out / (q[:, t] * sums).sum(-1, keepdim=True))
        else:
            outs.append(out * cell.head_dim**-0.5)
    return torch.stack(outs, 1)
