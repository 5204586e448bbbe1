"""Cells drawn at random: shapes that users may have, without tuning for them.

Cells are drawn one after another from a generator with a seed: a longer list of a seed begins with
the shorter ones, whatever is measured of them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from benchmarks.attentions import ATTENTIONS, HEADS, Attention
from benchmarks.cells import Cell
from benchmarks.figures import NORMAL

#: The values that are drawn; a repeated value is drawn more often.
KINDS = ("full", "causal", "causal", "causal", "window", "fp16", "softcap", "alibi", "packed")
WINDOWS = (128, 333, 1024, 4095)  # keys before its own that a query sees
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 224, 256, (192, 128))
LENGTHS = (256, 512, 777, 1024, 2048, 3000, 4096, 5555, 8192, 16384, 32768)
GROUPS = (1, 1, 2, 4, 8)  # heads of queries that share a head of keys
KV_HEADS = (1, 2, 3, 4, 8)
INPUTS = (NORMAL, NORMAL, "scaled:3", "scaled:8", "spike")
DOCUMENTS = (2, 8)  # fewest and most documents in a packed sequence

#: The exponents of 2 of the fewest and the most tokens times heads of queries.
LEAST, MOST = 16.5, 19.5

#: The attention of each kind, of `ATTENTIONS`, and its part of the spec besides head_dim and dtype.
SPECS = {
    "full": ("full", "mask=full()"),
    "causal": ("causal", "mask=causal()"),
    "window": ("window", 'mask=sliding_window(left=Int("left", min=0), right=0)'),
    "fp16": ("causal", "mask=causal()"),
    "softcap": ("softcap", 'mask=causal(), score=softcap(Float("cap", above=0.0))'),
    "alibi": ("alibi", f"mask=causal(), score=alibi({HEADS})"),
    "packed": ("documents", "mask=document() & causal()"),
}


@dataclass(frozen=True)
class Drawn(Cell):
    """A drawn cell; its module depends on kind, head dims and dtype.

    Attributes:
        kind: one of `KINDS`.
        sequences: sequences of the batch.
        kv_heads: heads of keys.
        group: heads of queries for each head of keys.
        inputs: a name of `benchmarks.inputs`.
        width: the width of a window.
        starts: where the documents of each packed sequence begin, the first at 0.
    """

    kind: str = "full"
    sequences: int = 1
    kv_heads: int = 1
    group: int = 1
    inputs: str = NORMAL
    width: int = 0
    starts: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        """Sequences of the batch."""
        return self.sequences

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self.kv_heads * self.group

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads

    @property
    def name(self) -> str:
        """The cell's name: ``"window_d128 333 S=777 B=40 H=8/2 spike"``."""
        width = [str(self.width)] if self.width else []
        heads = f"H={self.num_heads}/{self.num_kv_heads}"
        size = [f"S={self.seq_len}", f"B={self.batch}", heads]
        return " ".join([self.module, *width, *size, self.inputs])

    @property
    def spec(self) -> str:
        """The file that declares its module."""
        dims = (self.qk_head_dim, self.v_head_dim)
        head_dim = dims[0] if dims[0] == dims[1] else dims
        declared = f'head_dim={head_dim}, dtype="{self.dtype}", {SPECS[self.kind][1]}'
        return f"from flashgen import *\n\nspec = AttentionSpec({declared})\n"


def draw(seed: int, count: int) -> list[Drawn]:
    """Draws so many cells."""
    generator = random.Random(seed)
    return [_draw_one(generator) for _ in range(count)]


def _draw_one(generator: random.Random) -> Drawn:
    kind = generator.choice(KINDS)
    head_dim = generator.choice(HEAD_DIMS)
    length = generator.choice(LENGTHS)
    most = 2**MOST / length
    while (group := generator.choice(GROUPS)) * (kv_heads := generator.choice(KV_HEADS)) > most:
        pass  # too many for one sequence
    exponent = generator.uniform(LEAST, MOST)
    inputs = generator.choice(INPUTS)
    width = generator.choice(WINDOWS)
    cuts = generator.sample(range(1, length), generator.randint(*DOCUMENTS) - 1)
    qk, v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    return Drawn(
        module=f"{kind}_d{qk}" + (f"_v{v}" if v != qk else ""),
        attention=SPECS[kind][0],
        seq_len=length,
        qk_head_dim=qk,
        v_head_dim=v,
        dtype="float16" if kind == "fp16" else "bfloat16",
        kind=kind,
        sequences=_batch(exponent, length * group * kv_heads),
        kv_heads=kv_heads,
        group=group,
        inputs=inputs,
        width=width if kind == "window" else 0,
        starts=(0, *sorted(cuts)) if kind == "packed" else (),
    )


def _batch(exponent: float, work: int) -> int:
    """The number of sequences whose tokens times heads come nearest to 2**exponent, in bounds."""
    least, most = math.ceil(2**LEAST / work), math.floor(2**MOST / work)
    return min(max(round(2**exponent / work), least, 1), most)


def attention_of(cell: Drawn, device: torch.device) -> Attention:
    """The attention of a cell, in plain torch."""
    if cell.kind == "window":
        return _window(cell.width)
    if cell.kind == "packed":
        return _packed(cell, device)
    return ATTENTIONS[cell.attention](cell.seq_len, device)


def _window(width: int) -> Attention:
    def mask_mod(b: object, h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    return Attention(mask_mod, parameters={"left": width})


def _packed(cell: Drawn, device: torch.device) -> Attention:
    """Causal within documents, whose ids are (batch, seq_len) int32."""
    starts = torch.tensor(cell.starts[1:], device=device)
    places = torch.arange(cell.seq_len, device=device)
    in_each = torch.bucketize(places, starts, right=True).to(torch.int32)
    ids = in_each.expand(cell.batch, -1).contiguous()

    def mask_mod(b: object, h: object, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (in_each[q_idx] == in_each[kv_idx]) & (q_idx >= kv_idx)

    return Attention(mask_mod, parameters={"document_ids": ids})
