"""The cells of the benchmarks: which attention, at which size."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.attentions import CAP, CHUNK, DOCUMENT, PREFIX, SINKS, WINDOW

TOKENS = 16384  # batch * seq_len of every cell
WIDTH = 2048  # num_heads * qk_head_dim of every cell, up to whole heads


@dataclass(frozen=True)
class Cell:
    """One row of a benchmark.

    Attributes:
        module: the generated module that is measured.
        attention: what it computes, a key of `benchmarks.attentions.ATTENTIONS`.
        seq_len: queries and keys of a sequence.
        qk_head_dim: elements of a head's query and key.
        v_head_dim: elements of a head's value and output.
        dtype: the tensors' dtype, by torch's name; float32 products may use the tf32 units.
        in_grid: whether it belongs to the grid of the forward benchmark's summary.
        title: its title in a table of variants.
    """

    module: str
    attention: str
    seq_len: int
    qk_head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    in_grid: bool = False
    title: str = ""

    @property
    def batch(self) -> int:
        """Sequences of the batch."""
        return TOKENS // self.seq_len

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return WIDTH // self.qk_head_dim

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.num_heads

    @property
    def name(self) -> str:
        """The cell's name, unique among the cells: ``"causal_d128 S=2048"``."""
        return f"{self.module} S={self.seq_len}"

    def flops(self, pairs: int) -> int:
        """FLOPs for so many visible (query, key) pairs of a head of a sequence.

        There are two products, with a multiply and an add each.
        """
        return 2 * self.batch * self.num_heads * pairs * (self.qk_head_dim + self.v_head_dim)


GRID = tuple(
    Cell(f"{mask}_d{head_dim}", mask, seq_len, head_dim, head_dim, in_grid=True)
    for head_dim in (64, 128, 256)
    for mask in ("full", "causal")
    for seq_len in (2048, 8192, 16384)
)

DROPOUT = Cell("dropout_causal_d64", "dropout", 16384, 64, 64)

FORWARD = (
    *GRID,
    Cell("window_d128", "window", 16384, 128, 128),
    Cell("causal_fp16_d128", "causal", 16384, 128, 128, "float16"),
    Cell("causal_fp32_d64", "causal", 16384, 64, 64, "float32"),
    Cell("causal_d80", "causal", 16384, 80, 80),
    Cell("causal_d192_v128", "causal", 16384, 192, 128),
    DROPOUT,
)

#: The cell whose sizes are those of the encoder's q and k (`benchmarks.inputs`), without a lift.
AS_CAPTURED = Cell("full_d32", "full", 512, 32, 32)


def _variant(attention: str, title: str) -> Cell:
    return Cell(f"{attention}_d128", attention, 16384, 128, 128, title=title)


VARIANTS = (
    _variant("full", "full"),
    _variant("causal", "causal"),
    _variant("window", f"window of {WINDOW}"),
    _variant("documents", f"documents of {DOCUMENT}, causal"),
    _variant("softcap", f"softcap {CAP:g}, causal"),
    _variant("alibi", "ALiBi, causal"),
    _variant("prefix", f"prefix-LM {PREFIX}"),
    _variant("chunked", f"chunks of {CHUNK}, causal"),
    _variant("sink_window", f"{SINKS} sinks and a window of {WINDOW}"),
)

BACKWARD = (
    *GRID,
    _variant("window", f"window of {WINDOW}"),
    _variant("documents", f"documents of {DOCUMENT}, causal"),
    _variant("softcap", f"softcap {CAP:g}, causal"),
    _variant("alibi_slopes", "ALiBi with learned slopes, causal"),
    DROPOUT,
)
