"""Every mask, score function and normaliser that flashgen ships, for the sweeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen import (
    AttentionSpec,
    Constant,
    Float,
    Int,
    Mask,
    Normaliser,
    Score,
    Tensor,
    additive_bias,
    alibi,
    bigbird,
    block_sparse,
    causal,
    chosen_blocks,
    chunked,
    dilated,
    document,
    full,
    global_tokens,
    kv_len,
    log,
    maximum,
    natten_2d,
    prefix_lm,
    q_len,
    relative_bias,
    sigmoid_attention,
    sink_tokens,
    sliding_window,
    softcap,
    softmax,
    softmax_off_by_one,
    strided,
    t5_bias,
    temperature,
    tree,
)
from support.cases import Case


@dataclass(frozen=True)
class Entry:
    """One thing that flashgen ships, in a variant of its own.

    Attributes:
        mask: which keys a query sees.
        score: what becomes of the scores.
        normaliser: how they become weights.
        values: the parameters that cannot be just any; the others are drawn.
        made: its variants, by dtype, head dimension and other fields.
    """

    mask: Mask
    score: Score | None = None
    normaliser: Normaliser = field(default_factory=softmax)
    values: Callable[[Case], dict[str, Any]] = lambda case: {}
    made: dict[Any, AttentionSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def spec(self, dtype: str = "float16", head_dim: int = 16, **fields: Any) -> AttentionSpec:
        """The variant, the same one each time: `support.variants` keeps plans by specs."""
        key = (dtype, head_dim, *sorted(fields.items()))
        if key not in self.made:
            self.made[key] = AttentionSpec(
                head_dim,
                dtype,
                mask=self.mask,
                score=self.score,
                normaliser=self.normaliser,
                **fields,
            )
        return self.made[key]

    def case(self, case: Case) -> Case:
        """The call with parameters that this entry can take."""
        return replace(case, params={**self.values(case), **case.params})

    @property
    def equal_lengths(self) -> bool:
        """Whether it takes q_len == kv_len alone."""
        return self.spec().equal_lengths

    @property
    def odd_heads(self) -> int:
        """3, unless a table that is known when the module is built is for so many others."""
        limits = [limit for constant in self.spec().constants for limit in constant.limits]
        return next((int(size.sym) for of, size in limits if of == "num_q_heads"), 3)


_width = Int("width", 9)
_size = Int("size", 12, min=1)
_prefix = Tensor("prefix", ("batch",), "int32")
_widths = Tensor("widths", ("num_q_heads",), "int32")
_odd = Int("around", 3, min=1)
_heat = Tensor("heat", ("num_q_heads",))
_slopes = Tensor("slopes", ("num_q_heads",), "bfloat16")


#: Of blocks that cover the longest sequences of the sweeps; on each diagonal others are shown.
_blocks = [[(3 * i + 5 * j + i * j) % 7 < 2 for j in range(130)] for i in range(130)]
_near = [[(h + 1) * (d - 5) / 10 for d in range(11)] for h in range(4)]
_ids = Constant("ids", [i // 23 for i in range(2100)])


def _covering(case: Case) -> dict[str, int]:
    """Blocks so large that 99 of them cover the sequence."""
    return {"size": max(12, -(-max(case.q_len, case.kv_len) // 99))}


def _above_zero(case: Case) -> dict[str, torch.Tensor]:
    """A temperature for each head."""
    return {"heat": 0.5 + torch.arange(case.q_heads) / 3}


def _image(case: Case) -> dict[str, int]:
    """Of rows of 7 pixels, as many as the sequence takes."""
    return {"height": -(-case.q_len // 7), "width": 7}


def _drafts(case: Case) -> dict[str, torch.Tensor]:
    """A tree for each sequence: a token descends from one before it, and sees all it descends from.

    By what a token sees, so do those that descend from it.
    """
    generator = torch.Generator().manual_seed(case.q_len)
    seen = torch.eye(case.q_len, dtype=torch.bool).repeat(case.batch, 1, 1)
    for b in range(case.batch):
        for i in range(1, case.q_len):
            parent = int(torch.randint(max(0, i - 4), i, (), generator=generator))
            seen[b, i] |= seen[b, parent]
    return {"ancestors": seen}


def _far_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A window of eight keys for each head, further apart the further that head is to look."""
    gap = maximum(_widths[h], 1)
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < 8 * gap) & (distance % gap == 0)


def _padding(case: Case) -> dict[str, torch.Tensor]:
    """At either end of the keys; of the last sequence also between them."""
    at = torch.arange(case.kv_len)
    keep = torch.zeros(case.batch, case.kv_len, dtype=torch.bool)
    keep[::2], keep[1::2] = at >= case.kv_len // 3, at <= case.kv_len // 2
    keep[-1:, case.kv_len // 4 : 2 * case.kv_len // 5] = False
    return {"keep": keep}


_keep = Tensor("keep", ("batch", "kv_len"), "bool")


def _padded(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Causal attention to the keys that a tensor shows."""
    return (kv_idx <= q_idx + (kv_len - q_len)) & _keep[b, kv_idx]


_minus_log_keys = Score(lambda score, b, h, q_idx, kv_idx: score - log(kv_len), "minus_log_keys")


def _both(name: str, declare: Callable[..., Mask], *arguments: Any) -> dict[str, Entry]:
    """A mask of positions, at either end of sequences of different lengths."""
    return {
        name: Entry(declare(*arguments, align="bottom_right")),
        f"{name}_top_left": Entry(declare(*arguments, align="top_left")),
    }


MASKS: dict[str, Entry] = {
    "full": Entry(full()),
    **_both("causal", causal),
    **_both("sliding_window", sliding_window, _width, 2),
    **_both("sliding_window_by_head", sliding_window, _widths, 0),
    **_both("prefix_lm", prefix_lm, _width),
    **_both("prefix_lm_by_batch", prefix_lm, _prefix),
    **_both("chunked", chunked, _size),
    **_both("dilated", dilated, 3),
    **_both("strided", strided, _size),
    **_both("global_tokens", global_tokens, 5),
    **_both("document", document),
    "strided_heads": Entry(strided(8, heads="alternating")),
    "sink_tokens": Entry(sink_tokens(_width)),
    "document_unsorted": Entry(document(Tensor("ids", ("kv_len",), "int32"), align="top_left")),
    "document_cross": Entry(
        document(
            Tensor("ids", ("batch", "q_len"), "int32", sorted=True),
            Tensor("kv_ids", ("batch", "kv_len"), "int32", sorted=True),
        )
    ),
    "natten_2d": Entry(natten_2d(Int("height"), Int("width", min=1), 3), values=_image),
    "natten_2d_fixed": Entry(natten_2d(8, 6, (5, 4))),
    "bigbird": Entry(bigbird(16)),
    "bigbird_run_time": Entry(bigbird(_size, _odd, 2)),
    "tree": Entry(tree(), values=_drafts),
    "tree_of_all": Entry(tree(Tensor("ancestors", ("q_len", "q_len"), "bool"))),
    "block_sparse": Entry(block_sparse(block=16)),
    "block_sparse_run_time": Entry(block_sparse(block=_size)),
    "block_sparse_static": Entry(block_sparse(_blocks, 16)),
    "block_sparse_static_run_time": Entry(
        block_sparse([row[:99] for row in _blocks], _size), values=_covering
    ),
    "bigbird_static": Entry(bigbird(16, random=torch.tensor(_blocks))),
    "chosen_blocks": Entry(chosen_blocks(block=16)),
    "chosen_by_each_query": Entry(
        chosen_blocks(
            counts=Tensor("counts", ("batch", "num_kv_heads", "q_len"), "int32"),
            query_block=1,
        )
        & causal(align="bottom_right")
    ),
    "document_static": Entry(Mask(lambda b, h, q, kv: _ids[q] == _ids[kv], "document_static")),
    "block_sparse_shared": Entry(
        block_sparse(Tensor("layout", ((q_len + 9) // 10, (kv_len + 9) // 10), "bool"), 10)
    ),
    # Combined, as models have them and as they do not.
    "chunked_causal": Entry(chunked(_size) & causal()),
    "document_causal": Entry(document() & causal()),
    "document_window": Entry(document() & sliding_window(_width, 0)),
    "sinks_and_window": Entry(causal() & (sink_tokens(4) | sliding_window(_width, 0))),
    "longformer": Entry(global_tokens(3) | (dilated(2) & sliding_window(_width, _width))),
    "causal_blocks": Entry(causal() & block_sparse(block=16)),
    "outside_blocks": Entry(
        ~block_sparse(
            Tensor(
                "layout",
                ("batch", "num_q_heads", (q_len + 23) // 24, (kv_len + 23) // 24),
                "bool",
            ),
            24,
        )
    ),
    "other_documents": Entry(~document() & (causal() | sink_tokens(3))),
    "outside_chunks": Entry(~(chunked(_size) | prefix_lm(_prefix))),
}

#: Each beside a mask that leaves some rows without a key.
SCORES: dict[str, Entry] = {
    name: Entry(sliding_window(_width, 3, align="bottom_right"), score, values=_above_zero)
    for name, score in {
        "softcap": softcap(5.0),
        "softcap_run_time": softcap(Float("cap", 5.0, above=0)),
        "softcap_by_head": softcap(_heat),
        "temperature": temperature(_heat),
        "alibi": alibi(4, align="bottom_right"),
        "alibi_of_3_heads": alibi(3, bidirectional=True, align="top_left"),
        "alibi_table": alibi(_slopes, align="bottom_right"),
        "relative_bias": relative_bias(5, align="bottom_right"),
        "relative_bias_run_time": relative_bias(_width, align="top_left"),
        "relative_bias_static": relative_bias(
            5, Constant("near", _near, "bfloat16", dims=("num_q_heads", None)), align="top_left"
        ),
        "t5_bias": t5_bias(num_buckets=16, max_distance=30, align="bottom_right"),
        "t5_bias_causal": t5_bias(bidirectional=False, align="top_left"),
        "additive_bias": additive_bias(),
        "additive_bias_of_keys": additive_bias(
            Tensor("bias", ("batch", 1, 1, "kv_len"), "float16")
        ),
        "composed": softcap(5.0).then(alibi(_slopes, align="top_left")).then(temperature(_heat)),
    }.items()
}

#: Likewise.
NORMALISERS: dict[str, Entry] = {
    name: Entry(sliding_window(_width, 3, align="bottom_right"), None, normaliser)
    for name, normaliser in {
        "sink": softmax(sink=-0.5),
        "sink_run_time": softmax(sink=Float("sink")),
        "sink_by_head": softmax(sink=Tensor("sinks", ("num_q_heads",), "bfloat16")),
        "softmax_off_by_one": softmax_off_by_one(),
        "sigmoid": sigmoid_attention(),
    }.items()
} | {
    "sigmoid_with_bias": Entry(causal(), _minus_log_keys, sigmoid_attention()),
    "sink_and_softcap": Entry(document() & causal(), softcap(5.0), softmax_off_by_one()),
}

#: Functions of users' own, with what no entry above has: a divisor that is an element, and keys
#: that a tensor shows.
OTHERS = {
    "dilated_by_head": Entry(Mask(_far_heads, "dilated_by_head")),
    "padded": Entry(Mask(_padded, "padded"), values=_padding),
}

VOCABULARY = MASKS | SCORES | NORMALISERS | OTHERS
