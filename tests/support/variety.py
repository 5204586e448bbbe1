"""Variants beyond the shipped ones: masks that combine and head dimensions of every shape."""

from __future__ import annotations

from flashgen import AttentionSpec, Int, Mask, causal, full, kv_len, q_len, sliding_window

_left = Int("left", default=3)
_period = Int("period", default=5, min=1)

MASKS: dict[str, Mask] = {
    "everything": full(),
    "outside_window": ~sliding_window(4, 2, align="top_left"),
    "two_runs": sliding_window(9, 4, align="top_left") & ~sliding_window(3, 1, align="top_left"),
    "causal_or_window": causal(align="top_left") | sliding_window(0, 6, align="top_left"),
    "two_alignments": sliding_window(2, 2, align="top_left")
    | sliding_window(2, 2, align="bottom_right"),
    "anticausal": ~causal(align="bottom_right"),
    "nothing": full() & ~full(),
    "run_time_window": sliding_window(_left, 1, align="bottom_right"),
}


def _spec(mask, head_dim=16, **fields) -> AttentionSpec:
    return AttentionSpec(head_dim=head_dim, dtype="float16", mask=mask, **fields)


#: By what is special about their masks.
MASK_SPECS: dict[str, AttentionSpec] = {
    **{name: _spec(mask) for name, mask in MASKS.items()},
    "some_heads": _spec(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (h < 2)),
    "by_batch": _spec(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4 * b),
    "prefix": _spec(lambda b, h, q_idx, kv_idx: (kv_idx < 11) | (q_idx >= kv_idx)),
    "sinks": _spec(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 2) | (q_idx - kv_idx <= _left))
    ),
    "chunks": _spec(lambda b, h, q_idx, kv_idx: q_idx // 12 == kv_idx // 12),
    "dilated": _spec(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % _period == 0),
    "not_equal": _spec(lambda b, h, q_idx, kv_idx: q_idx != kv_idx),
    "either_or": _spec(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) ^ (kv_idx < 9)),
    "last_keys": _spec(lambda b, h, q_idx, kv_idx: kv_idx >= kv_len - 10),
    "first_queries": _spec(lambda b, h, q_idx, kv_idx: q_idx < 20),
    "by_length": _spec(lambda b, h, q_idx, kv_idx: kv_len < 40),
    "later_half": _spec(lambda b, h, q_idx, kv_idx: 2 * kv_idx >= q_idx + q_len // 2),
    "distance": _spec(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= 7),
    "antidiagonal": _spec(lambda b, h, q_idx, kv_idx: q_idx + kv_idx < 40),
}

#: By head dimension: powers of two, sums of them, padded ones, and values of another size.
HEAD_DIM_SPECS: dict[str, AttentionSpec] = {
    "x".join(map(str, head_dim if isinstance(head_dim, tuple) else (head_dim,))): _spec(
        causal(align="bottom_right"), head_dim
    )
    for head_dim in (16, 24, 40, 48, 72, 88, 96, 160, 512, (64, 32), (32, 80), (24, 128))
}
