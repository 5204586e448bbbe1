"""The cells of the forward benchmark: which attention, at which size, and its count of FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TOKENS = 16384  # batch * seq_len of every cell
WIDTH = 2048  # num_heads * qk_head_dim of every cell, as near as whole heads come
WINDOW = 1024  # keys before its own that a query of the window cell sees

MaskName = Literal["full", "causal", "window"]


@dataclass(frozen=True)
class Cell:
    """One row of the benchmark.

    Attributes:
        module: the generated module that is measured.
        mask: ``"full"``, ``"causal"``, or ``"window"`` (causal, `WINDOW` keys back).
        seq_len: queries and keys of a sequence.
        qk_head_dim: elements of a head's query and key.
        v_head_dim: elements of a head's value and output.
        dtype: of the tensors, by torch's name; float32 products may use the tf32 units.
        in_grid: whether it belongs to the grid of the summary, else to the further variants.
    """

    module: str
    mask: MaskName
    seq_len: int
    qk_head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    in_grid: bool = True

    @property
    def batch(self) -> int:
        """Sequences of the batch."""
        return TOKENS // self.seq_len

    @property
    def num_heads(self) -> int:
        """Heads, as many of the keys as of the queries."""
        return WIDTH // self.qk_head_dim

    @property
    def name(self) -> str:
        """What a person calls it, unique among the cells: ``"causal_d128 S=2048"``."""
        return f"{self.module} S={self.seq_len}"

    @property
    def flops(self) -> int:
        """FLOPs of the elements that the mask shows: two products, a multiply and an add each."""
        pairs = visible_pairs(self.mask, self.seq_len)
        return 2 * self.batch * self.num_heads * pairs * (self.qk_head_dim + self.v_head_dim)


def visible_pairs(mask: MaskName, seq_len: int, window: int = WINDOW) -> int:
    """How many (query, key) pairs of one head of one sequence the mask shows."""
    if mask == "full":
        return seq_len * seq_len
    if mask == "causal":
        return seq_len * (seq_len + 1) // 2
    before = min(window, seq_len - 1)  # the first queries have fewer keys before them
    return (before + 1) * seq_len - before * (before + 1) // 2


GRID = tuple(
    Cell(f"{mask}_d{head_dim}", mask, seq_len, head_dim, head_dim)
    for head_dim in (64, 128, 256)
    for mask in ("full", "causal")
    for seq_len in (2048, 8192, 16384)
)

VARIANTS = (
    Cell("window_d128", "window", 16384, 128, 128, in_grid=False),
    Cell("causal_fp16_d128", "causal", 16384, 128, 128, "float16", in_grid=False),
    Cell("causal_fp32_d64", "causal", 16384, 64, 64, "float32", in_grid=False),
    Cell("causal_d80", "causal", 16384, 80, 80, in_grid=False),
    Cell("causal_d192_v128", "causal", 16384, 192, 128, in_grid=False),
)

CELLS = (*GRID, *VARIANTS)
