"""Variants beyond the shipped ones: odd masks, odd scores, head dimensions of every shape."""

from __future__ import annotations

from flashgen import (
    AttentionSpec,
    Float,
    Int,
    Mask,
    Tensor,
    block_sparse,
    causal,
    exp,
    full,
    kv_len,
    log,
    q_len,
    sin,
    sliding_window,
    softmax,
    where,
)

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
    "block_table": _spec(causal(align="bottom_right") & block_sparse(block=16)),
    "last_keys": _spec(lambda b, h, q_idx, kv_idx: kv_idx >= kv_len - 10),
    "first_queries": _spec(lambda b, h, q_idx, kv_idx: q_idx < 20),
    "by_length": _spec(lambda b, h, q_idx, kv_idx: kv_len < 40),
    "later_half": _spec(lambda b, h, q_idx, kv_idx: 2 * kv_idx >= q_idx + q_len // 2),
    "distance": _spec(lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= 7),
    "antidiagonal": _spec(lambda b, h, q_idx, kv_idx: q_idx + kv_idx < 40),
    "bits": _spec(lambda b, h, q_idx, kv_idx: abs((kv_idx & 7) - (q_idx & 7)) <= 2),
    "square_of_a_distance": _spec(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) ** 2 < 90),
}

_factor = Float("factor", -1.5)
_signs = Tensor("signs", ("num_q_heads",))
_tilt = Tensor("tilt", ("batch", "q_len"), "float16")
_near = Tensor("near", ("num_q_heads", 640))
_gone = Tensor("gone", ("batch", "kv_len"), "bool")


def _score_spec(score, mask=None, **fields) -> AttentionSpec:
    if mask is None:
        mask = sliding_window(20, 4, align="bottom_right")
    return _spec(mask, score=score, **fields)


#: By what is special about their scores.
SCORE_SPECS: dict[str, AttentionSpec] = {
    "negated": _score_spec(lambda s, b, h, q_idx, kv_idx: -s),
    "times_a_float_of_any_sign": _score_spec(lambda s, b, h, q_idx, kv_idx: s * _factor),
    "times_heads_of_any_sign": _score_spec(lambda s, b, h, q_idx, kv_idx: s * _signs[h]),
    "times_rows_of_any_sign": _score_spec(lambda s, b, h, q_idx, kv_idx: s * _tilt[b, q_idx]),
    "times_rows": _score_spec(lambda s, b, h, q_idx, kv_idx: s * (1 + q_idx % 3)),
    "times_keys": _score_spec(lambda s, b, h, q_idx, kv_idx: s * (0.5 + kv_idx % 2)),
    "times_zero": _score_spec(lambda s, b, h, q_idx, kv_idx: s * 0),
    "plus_rows": _score_spec(lambda s, b, h, q_idx, kv_idx: s + 3 * _tilt[b, q_idx]),
    "plus_rows_and_a_sink": _score_spec(
        lambda s, b, h, q_idx, kv_idx: s + 3 * _tilt[b, q_idx], normaliser=softmax(sink=1.0)
    ),
    "positions_alone": _score_spec(lambda s, b, h, q_idx, kv_idx: sin(0.3 * (q_idx - kv_idx))),
    "absolute": _score_spec(lambda s, b, h, q_idx, kv_idx: abs(s) - 0.5 * abs(q_idx - kv_idx)),
    "power_of_a_distance": _score_spec(
        lambda s, b, h, q_idx, kv_idx: s - abs(q_idx - kv_idx) ** 0.3
    ),
    "elements_by_bits": _score_spec(
        lambda s, b, h, q_idx, kv_idx: s + _near[h, (q_idx & 3) + (kv_idx ^ 1)]
    ),
    "squared": _score_spec(lambda s, b, h, q_idx, kv_idx: s * s / 4 - exp(-s)),
    "distance_logarithm": _score_spec(
        lambda s, b, h, q_idx, kv_idx: s - log(1.0 + abs(q_idx - kv_idx))
    ),
    "distances_twice": _score_spec(
        lambda s, b, h, q_idx, kv_idx: (
            s * _near[h, kv_idx - q_idx + 320] + _near[h, kv_idx - q_idx + 320]
        )
    ),
    "length_logarithm": _score_spec(lambda s, b, h, q_idx, kv_idx: s * log(kv_len) / 3),
    "far_away": _score_spec(lambda s, b, h, q_idx, kv_idx: s + 1000 + 10 * q_idx),
    "hides_keys": _score_spec(
        lambda s, b, h, q_idx, kv_idx: where(_gone[b, kv_idx], float("-inf"), s)
    ),
    "hides_keys_by_a_number": _score_spec(
        lambda s, b, h, q_idx, kv_idx: where(_gone[b, kv_idx], -3.0e38, s)
    ),
    "hides_rows": _score_spec(
        lambda s, b, h, q_idx, kv_idx: where(q_idx % 5 < 2, float("-inf"), s), full()
    ),
    "half_the_heads": _score_spec(
        lambda s, b, h, q_idx, kv_idx: where(h % 2 == 0, s - 0.2 * abs(q_idx - kv_idx), s), full()
    ),
}

#: By head dimension: powers of two, sums of them, padded ones, and values of another size.
HEAD_DIM_SPECS: dict[str, AttentionSpec] = {
    "x".join(map(str, head_dim if isinstance(head_dim, tuple) else (head_dim,))): _spec(
        causal(align="bottom_right"), head_dim
    )
    for head_dim in (16, 24, 40, 48, 72, 88, 96, 160, 512, (64, 32), (32, 80), (24, 128))
}
