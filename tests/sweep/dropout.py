"""Variants with dropout, of each kind of mask, score function and normaliser that meets it."""

from __future__ import annotations

from typing import Any

import torch

from flashgen import (
    AttentionSpec,
    Tensor,
    alibi,
    block_sparse,
    causal,
    full,
    sigmoid_attention,
    sliding_window,
    softcap,
    softmax,
)
from support.cases import Case

_table = Tensor("table", ("num_q_heads", 64), "float32")
_sinks = Tensor("sinks", ("num_q_heads",), "float32")
_layout = Tensor("layout", ("batch", None, None), "bool")

SPECS = {
    "full": AttentionSpec(64, "float32", full(), dropout=True),
    "segments": AttentionSpec(80, "float16", causal(), dropout=True),
    "unequal": AttentionSpec((32, 48), "float16", causal(align="top_left"), dropout=True),
    "softcap": AttentionSpec(32, "float16", causal(), softcap(20.0), dropout=True),
    # Whose slope turns the sign that says what was kept.
    "negated": AttentionSpec(
        32, "float16", causal(), lambda score, b, h, q, kv: -0.5 * score, dropout=True
    ),
    "alibi": AttentionSpec(32, "float32", causal(), alibi(8), dropout=True),
    "learned": AttentionSpec(
        16,
        "float32",
        causal(),
        lambda score, b, h, q, kv: score + _table[h, q - kv],  # type: ignore[arg-type]
        dropout=True,
    ),
    "sinks": AttentionSpec(
        16,
        "float32",
        sliding_window(9, 0, align="bottom_right"),
        normaliser=softmax(sink=_sinks),
        dropout=True,
    ),
    "sigmoid": AttentionSpec(32, "float32", causal(), normaliser=sigmoid_attention(), dropout=True),
    "part": AttentionSpec(32, "float16", causal(), dropout=True, forms=("dense", "mesh")),
    "listed_part": AttentionSpec(
        32,
        "float16",
        block_sparse(_layout, 32) & causal(),
        dropout=True,
        forms=("dense", "mesh"),
    ),
    "listed": AttentionSpec(16, "float16", block_sparse(_layout, 8) & causal(), dropout=True),
}


def case_of(name: str, *sizes: int, **params: Any) -> Case:
    """A case of a variant, with a layout that shows some blocks to the one that reads it.

    A part begins at some head, query and key of its whole.

    Args:
        name: a key of `SPECS`.
        sizes: q_len, kv_len, and what else a case has of them.
        params: values of run-time parameters.
    """
    case = Case(*sizes, params=params)
    if name.endswith("part"):
        params |= {"q_offset": 48, "kv_offset": 16, "head_offset": 3}
    if name.startswith("listed"):
        generator = torch.Generator().manual_seed(1)
        lengths, block = (case.q_len, case.kv_len), 8
        if name == "listed_part":
            lengths, block = (48 + case.q_len, 16 + case.kv_len), 32
        shape = (case.batch, *(-(-length // block) for length in lengths))
        params["layout"] = torch.rand(shape, generator=generator) < 0.6
    return case
