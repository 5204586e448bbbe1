"""The measured passes of attention: the forward pass, or the backward pass alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch._functorch.config

from benchmarks.accuracy import Inputs, Results, exact_gradients, exact_heads, make_gradient
from benchmarks.attentions import Attention
from benchmarks.cells import Cell
from benchmarks.peers import PEERS, Call, Peer
from flashgen.kernels.registry import keys, with_key

#: Peers whose arguments and results have the layout (batch, seq, heads, head_dim).
SEQUENCE_FIRST = ("FA4", "varlen_attn")


@dataclass(frozen=True)
class Pass:
    """A pass over attention.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        peers: the peers that can compute it, by name.
        exact: its results in float64, for the first and the last head of the batch.
        work: its FLOPs over those of the forward pass.
        kernels: the keys of its kernels, for which the benchmark's own modules are tuned.
    """

    name: str
    peers: Mapping[str, Peer]
    exact: Callable[[Cell, Attention, Inputs], list[torch.Tensor]]
    work: float
    kernels: tuple[str, ...]


def differentiated(name: str, peer: Peer) -> Peer:
    """A peer's backward pass alone: its call gives the gradients of q, k, v and what is learned.

    The forward pass has run before, once, on tensors in the peer's layout; the output's gradient
    has the output's layout.
    """

    @contextmanager
    def entered(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
        # The forward pass is kept for one backward pass after the other, which a compiled one
        # has to be told.
        torch._functorch.config.donated_buffer = False
        qkv = tuple(_leaf(x, transposed=name in SEQUENCE_FIRST) for x in inputs)
        learned = tuple(attention.parameters[name] for name in attention.learned)
        with ExitStack() as entered_peer:
            with torch.enable_grad():
                [out] = as_results(entered_peer.enter_context(peer(cell, attention, qkv))())
            grad_out = torch.empty_like(out).copy_(make_gradient(cell, out.device))
            yield lambda: torch.autograd.grad(out, (*qkv, *learned), grad_out, retain_graph=True)

    return entered


def _leaf(x: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """A tensor (batch, heads, seq, head_dim) to differentiate by, perhaps laid out sequence first.

    In that case it is a view of a leaf, so that nothing copies it.
    """
    if not transposed:
        return x.detach().requires_grad_()
    leaf = x.detach().transpose(1, 2).contiguous().requires_grad_()
    with torch.enable_grad():
        return leaf.transpose(1, 2)


def as_results(found: torch.Tensor | Results) -> Results:
    """The tensors of a call's result."""
    return [found] if isinstance(found, torch.Tensor) else found


def _keys(*, gradients: bool) -> tuple[str, ...]:
    """The kernels of a pass."""
    return tuple(key for key in keys() if with_key(key).gradients == gradients)


FORWARD_PASS = Pass("forward", PEERS, exact_heads, 1.0, _keys(gradients=False))

#: The backward pass: five products, where the forward pass has two.
BACKWARD_PASS = Pass(
    "backward",
    {name: differentiated(name, peer) for name, peer in PEERS.items()},
    exact_gradients,
    2.5,
    _keys(gradients=True),
)

PASSES = {which.name: which for which in (FORWARD_PASS, BACKWARD_PASS)}
