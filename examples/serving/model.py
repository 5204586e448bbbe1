"""A GPT over packed tokens: which keys a token sees is left to a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

#: Attention of a layer: its number, and q, k and v, each (tokens, heads, head_dim), to q's shape.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Of a model; heads of queries share heads of keys."""

    vocabulary: int
    max_len: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Of a token between layers."""
        return self.heads * self.head_dim

    @property
    def cached(self) -> int:
        """The numbers that a token has in the cache of a layer: its keys and values."""
        return 2 * self.kv_heads * self.head_dim


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP."""

    def __init__(self, size: Size):
        super().__init__()
        self.size, width = size, size.width
        self.norm_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, (size.heads + 2 * size.kv_heads) * size.head_dim, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, layer: int, attend: Attend) -> torch.Tensor:
        """(tokens, width) to the same."""
        size = self.size
        heads = self.to_qkv(self.norm_attention(x)).unflatten(-1, (-1, size.head_dim))
        q, k, v = heads.split((size.heads, size.kv_heads, size.kv_heads), dim=1)
        x = x + self.to_out(attend(layer, q, k, v).flatten(1))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, and a head that scores the next token."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.max_len, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        """(tokens,) numbers and positions to scores (rows, vocabulary) of the token after each."""
        x = self.tokens(tokens) + self.positions(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.head(self.norm(x[rows]))


def dense(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of all tokens of one sequence, by torch and without a cache."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(
        0, 1
    )


@torch.no_grad()
def dense_scores(model: GPT, tokens: list[int], first: int) -> torch.Tensor:
    """Scores of the tokens after position `first` and after each later one, recomputed."""
    device = model.head.weight.device
    numbers = torch.tensor(tokens, device=device)
    return model(numbers, torch.arange(len(tokens), device=device), dense, slice(first, None))


def generate_densely(model: GPT, prompt: list[int], new: int) -> list[int]:
    """The greedy tokens after a prompt, each computed from all before it, without a cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(dense_scores(model, tokens, len(tokens) - 1).argmax()))
    return tokens[len(prompt) :]
