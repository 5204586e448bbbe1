"""A small GPT whose attention is a generated kernel; `python examples/gpt.py` trains a few steps.

On a GPU the module's kernels run, forward and backward; on a CPU its eager reference, which it says
once, in a warning.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from generated import causal_d64

HEAD_DIM = 64  # what the module was built for


class CausalSelfAttention(nn.Module):
    """Multi-head attention through the generated module."""

    def __init__(self, width: int):
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        batch, seq_len, width = x.shape
        qkv = self.to_qkv(x).view(batch, seq_len, 3, width // HEAD_DIM, HEAD_DIM)
        # Views of any strides will do: nothing is copied on the way into the kernel.
        q, k, v = qkv.to(torch.bfloat16).permute(2, 0, 3, 1, 4)
        out = causal_d64.attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(batch, seq_len, width).to(x.dtype))


class Block(nn.Module):
    """A transformer block, normalised before attention and before the MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that scores the next token."""

    def __init__(self, vocabulary: int, max_len: int, width: int = 128, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_len, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) token numbers to (batch, seq, vocabulary) scores of the next."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def progressions(batch: int, seq_len: int, vocabulary: int) -> torch.Tensor:
    """Synthetic text: each sequence counts up, modulo the vocabulary, in steps of its own.

    The next token follows from the last two, so a model has to look back to know it.
    """
    start = torch.randint(vocabulary, (batch, 1))
    step = torch.randint(1, 5, (batch, 1))
    return (start + step * torch.arange(seq_len)) % vocabulary


def train(steps: int, device: str, seed: int = 0) -> list[float]:
    """Trains from scratch; the loss of every step, ln(32) = 3.47 being that of a guess."""
    torch.manual_seed(seed)
    vocabulary, seq_len = 32, 48
    model = GPT(vocabulary, seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens = progressions(16, seq_len + 1, vocabulary).to(device)
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains on the GPU if there is one and prints how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    for step, loss in enumerate(train(options.steps, options.device), start=1):
        if step == 1 or step % 10 == 0:
            print(f"step {step:4}  loss {loss:.3f}")


if __name__ == "__main__":
    main()
