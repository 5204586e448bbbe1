"""What of attention is measured: the forward pass, or the backward pass alone."""

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

#: Peers that take, and return, (batch, seq, heads, head_dim): their tensors lie so.
SEQUENCE_FIRST = ("FA4", "varlen_attn")


@dataclass(frozen=True)
class Pass:
    """A pass over attention.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        peers: those who can be asked for it, by name.
        exact: its results in float64, of the first and the last head of the batch.
        work: its FLOPs over those of the forward pass.
        kernels: those that it runs, by their keys, by which the benchmark's own modules are tuned.
    """

    name: str
    peers: Mapping[str, Peer]
    exact: Callable[[Cell, Attention, Inputs], list[torch.Tensor]]
    work: float
    kernels: tuple[str, ...]


def differentiated(name: str, peer: Peer) -> Peer:
    """A peer's backward pass alone: its call gives the gradients of q, k, v and what is learned.

    The forward pass has run before, once, on tensors that lie as the peer has them; so does the
    gradient of the output, as the output does.
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

    Then it is a view of a leaf, so that nobody copies it.
    """
    if not transposed:
        return x.detach().requires_grad_()
    leaf = x.detach().transpose(1, 2).contiguous().requires_grad_()
    with torch.enable_grad():
        return leaf.transpose(1, 2)


def as_results(found: torch.Tensor | Results) -> Results:
    """What a call returned, as the tensors that it holds."""
    return [found] if isinstance(found, torch.Tensor) else found


def _keys(*, gradients: bool) -> tuple[str, ...]:
    """The kernels of a pass."""
    return tuple(key for key in keys() if with_key(key).gradients == gradients)


FORWARD_PASS = Pass("forward", PEERS, exact_heads, 1.0, _keys(gradients=False))

#: It takes five products where the forward pass takes two.
BACKWARD_PASS = Pass(
    "backward",
    {name: differentiated(name, peer) for name, peer in PEERS.items()},
    exact_gradients,
    2.5,
    _keys(gradients=True),
)

PASSES = {which.name: which for which in (FORWARD_PASS, BACKWARD_PASS)}
