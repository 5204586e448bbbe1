"""The values of q, k and v: the speed of a kernel must not depend on them.

- ``normal``: all standard normal.
- ``scaled:N``: q, and so the scores, N times as large.
- ``growing``: each key larger than the one before, the last `GROWTH` times as large as normal.
- ``spike``: one key whose elements are all `SPIKE`, a head's first, the next head's last;
  ``spike:first`` and ``spike:last`` have it at one place for all heads.
- ``encoder``: q and k of the first layer of a sentence encoder on a page of text, as
  `benchmarks.capture_encoder` kept them: 12 heads, 512 tokens, 32 columns. v is normal.

At 32 columns and up to 512 tokens the encoder's q and k are used unchanged. The lift to other sizes
keeps every score, and so their mean, their spread and their growth along the keys:

- columns: a rotation of 32 columns into head_dim, the same for q and k, with orthonormal rows,
  keeps every product; both are scaled by (head_dim / 32) ** 0.25, because the softmax scale is
  head_dim ** -0.5.
- tokens: a longer sequence starts again with the first token after the 512th. No row has a larger
  score than with 512 keys.
- heads: the heads of keys, over the sequences of a batch, take the 12 in turn, and heads of queries
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
        cell: the cell.
        device: the tensors' device.
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
    """The name, if such inputs exist.

    Raises:
        ValueError: there are no inputs of this name.
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
    """`checked_name` for an argument of a command."""
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
    """Captured queries or keys, (heads, tokens, columns), rotated into so many columns.

    Raises:
        ValueError: there are too few columns.
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
