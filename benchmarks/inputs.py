"""What q, k and v hold: the speed of a kernel must not depend on it.

- ``normal``: standard normal, all of them.
- ``scaled:N``: q N times as large, and so the scores.
- ``growing``: each key larger than the one before, the last `GROWTH` times as large as normal.
- ``spike``: one key whose elements are all `SPIKE`, a head's first, the next head's last;
  ``spike:first`` and ``spike:last`` have it in one place alone.
- ``encoder``: q and k of the first layer of a sentence encoder on a page of text, as
  `benchmarks.capture_encoder` kept them: 12 heads, 512 tokens, 32 columns. v is normal.

At 32 columns and up to 512 tokens the encoder's are run as they are. The lift to other sizes leaves
every score as it was, and so their mean, their spread and their growth along the keys:

- columns: a turn of 32 columns into head_dim, the same for q and k, with orthonormal rows, keeps
  every product; both are (head_dim / 32) ** 0.25 times as large, for head_dim ** -0.5 is the scale.
- tokens: a longer sequence begins again with the first token after the 512th. No row finds more
  than it had in 512 keys.
- heads: those of the keys, over the sequences of a batch, take the 12 in turn, and heads of queries
  that share keys have the same queries.
"""

from __future__ import annotations

import argparse
import math
from functools import cache

import torch

from benchmarks.accuracy import Inputs
from benchmarks.capture_encoder import CAPTURED
from benchmarks.cells import Cell
from benchmarks.figures import NORMAL

GROWTH = 16.0
SPIKE = 30.0

ENCODER = "encoder"
NAMES = (NORMAL, "scaled:N", "growing", "spike", "spike:first", "spike:last", ENCODER)


def make_inputs(cell: Cell, device: torch.device, name: str = NORMAL) -> Inputs:
    """q, k and v, (batch, heads, seq, head_dim), the same every time.

    Args:
        cell: whose they are.
        device: where.
        name: one of `NAMES`, with a number for N.

    Raises:
        ValueError: there is no such name, or heads are too narrow for the encoder's.
    """
    checked_name(name)
    torch.manual_seed(0)
    heads, kv_heads = cell.num_heads, cell.num_kv_heads
    q = _normal(cell, heads, cell.qk_head_dim, device)
    k = _normal(cell, kv_heads, cell.qk_head_dim, device)
    v = _normal(cell, kv_heads, cell.v_head_dim, device)
    kind, _, how = name.partition(":")
    if kind == "scaled":
        q *= float(how)
    elif kind == "growing":
        k *= torch.linspace(1, GROWTH, cell.seq_len, dtype=k.dtype, device=device)[:, None]
    elif kind == "spike":
        by_head = k.flatten(0, 1)
        first, last = (by_head[::2], by_head[1::2]) if not how else (by_head, by_head)
        if how != "last":
            first[:, 0] = SPIKE
        if how != "first":
            last[:, -1] = SPIKE
    elif kind == ENCODER:
        q, k = _encoder(cell, device)
    return q, k, v


def checked_name(name: str) -> str:
    """The name of inputs that there are.

    Raises:
        ValueError: there are none of it.
    """
    kind, _, how = name.partition(":")
    try:
        found = name in NAMES or (kind == "scaled" and 0 < float(how) < math.inf)
    except ValueError:
        found = False
    if not found or name == "scaled:N":
        raise ValueError(f"inputs {name!r}: write one of {', '.join(NAMES)}; N is a number over 0")
    return name


def named_inputs(text: str) -> str:
    """The same for an argument of a command."""
    try:
        return checked_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _normal(cell: Cell, heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    shape = (cell.batch, heads, cell.seq_len, head_dim)
    return torch.randn(shape, dtype=getattr(torch, cell.dtype), device=device)


@cache
def captured() -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's q and k, (12, 512, 32) float32."""
    kept = torch.load(CAPTURED, weights_only=True)
    return kept["q"].float(), kept["k"].float()


def turned(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Captured queries or keys, (heads, tokens, columns), in so many columns.

    Raises:
        ValueError: so few cannot hold them.
    """
    columns = x.shape[-1]
    if head_dim < columns:
        raise ValueError(f"inputs 'encoder': head_dim {head_dim} is below their {columns} columns")
    if head_dim == columns:
        return x
    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(head_dim, columns, generator=generator))
    found: torch.Tensor = (x @ turn.T) * (head_dim / columns) ** 0.25
    return found


def _encoder(cell: Cell, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    heads = torch.arange(cell.batch * cell.num_kv_heads, device=device)
    of_kv = heads.reshape(cell.batch, cell.num_kv_heads)
    of_q = of_kv.repeat_interleave(cell.num_heads // cell.num_kv_heads, 1)
    dtype = getattr(torch, cell.dtype)
    q, k = (turned(x, cell.qk_head_dim).to(device, dtype) for x in captured())
    tokens = torch.arange(cell.seq_len, device=device) % q.shape[1]
    return q[of_q[..., None] % len(q), tokens], k[of_kv[..., None] % len(k), tokens]
