"""Kernels that read tensors inside their loop, one for each way in which the compiler treats loads.

The budget is held to what the compiler allots them: tests/compile and tests/data.
"""

from __future__ import annotations

from typing import Any

from flashgen import AttentionSpec, Tensor, causal, sigmoid_attention, softcap, tanh

_EVERYWHERE = ("batch", "num_q_heads", "q_len", "kv_len")

_bias = Tensor("bias", _EVERYWHERE)
_half = Tensor("half", _EVERYWHERE, "bfloat16")
_transposed = Tensor("transposed", ("kv_len", "q_len"), "float16")
_by_distance = Tensor("by_distance", ("num_q_heads", None))
_half_by_distance = Tensor("half_by_distance", ("num_q_heads", None), "float16")
_keys = Tensor("keys", ("batch", "kv_len"))
_half_keys = Tensor("half_keys", ("batch", "kv_len"), "bfloat16")
_rows = Tensor("rows", ("batch", "q_len"))
_begin, _end, _never = (Tensor(n, ("batch", "q_len"), "int32") for n in ("begin", "end", "never"))
_ids = Tensor("ids", ("batch", "kv_len"), "int32")
_shown = Tensor("shown", ("q_len", "kv_len"), "bool")
_shown_by_key = Tensor("shown_by_key", ("kv_len", "q_len"), "bool")
_levels = Tensor("levels", ("q_len", "kv_len"), "int32")


def _capped(score: Any) -> Any:
    """After this, an addend is no longer added to the raw products."""
    return 30.0 * tanh(score / 30.0)


SCORES: dict[str, Any] = {
    "bias": lambda s, b, h, q, kv: s + _bias[b, h, q, kv],
    "half": lambda s, b, h, q, kv: s + _half[b, h, q, kv],
    "transposed": lambda s, b, h, q, kv: s + _transposed[kv, q],
    "forward": lambda s, b, h, q, kv: s + _by_distance[h, kv - q + 100],
    "backward": lambda s, b, h, q, kv: s + _by_distance[h, q - kv],
    "half_backward": lambda s, b, h, q, kv: s + _half_by_distance[h, q - kv],
    "antidiagonal": lambda s, b, h, q, kv: s + _by_distance[h, q + kv],
    "capped_bias": lambda s, b, h, q, kv: _capped(s) + _bias[b, h, q, kv],
    "capped_half": lambda s, b, h, q, kv: _capped(s) + _half[b, h, q, kv],
    "capped_transposed": lambda s, b, h, q, kv: _capped(s) + _transposed[kv, q],
    "keys": lambda s, b, h, q, kv: s + _keys[b, kv],
    "half_keys": lambda s, b, h, q, kv: s + _half_keys[b, kv],
    "capped_keys": lambda s, b, h, q, kv: _capped(s) + _keys[b, kv],
    "rows": lambda s, b, h, q, kv: _capped(s * _rows[b, q]) + kv * _rows[b, q],
    "two_biases": lambda s, b, h, q, kv: s + _bias[b, h, q, kv] + _by_distance[h, q - kv],
    "bias_and_half": lambda s, b, h, q, kv: s + _bias[b, h, q, kv] + _half_by_distance[h, q - kv],
    "two_halves": lambda s, b, h, q, kv: s + _half[b, h, q, kv] + _half_by_distance[h, q - kv],
    "indirect": lambda s, b, h, q, kv: s + _by_distance[h, _ids[b, kv] - q],
    "capped_indirect": lambda s, b, h, q, kv: _capped(s) + _by_distance[h, _ids[b, kv] - q],
}

MASKS: dict[str, Any] = {
    "ids": lambda b, h, q, kv: (q >= kv) & (_ids[b, kv] != 7),
    "ids_of_rows": lambda b, h, q, kv: (_ids[b, kv] == _begin[b, q]) & (kv <= q),
    "ends": lambda b, h, q, kv: (kv >= _begin[b, q]) & (kv < _end[b, q]) & (kv != _never[b, q]),
    "shown": lambda b, h, q, kv: _shown[q, kv],
    "shown_by_key": lambda b, h, q, kv: _shown_by_key[kv, q],
    "levels": lambda b, h, q, kv: _levels[q, kv] > 3,
    "distances": lambda b, h, q, kv: (q >= kv) & (_by_distance[h, q - kv] > 0),
}

#: Fields of the spec, by name.
KERNELS: dict[str, dict[str, Any]] = {
    "causal": {"mask": causal()},
    **{name: {"mask": causal(), "score": score} for name, score in SCORES.items()},
    **{name: {"mask": mask} for name, mask in MASKS.items()},
    "shown_and_bias": {"mask": MASKS["shown"], "score": SCORES["bias"]},
    "shown_and_half": {"mask": MASKS["shown"], "score": SCORES["half"]},
    "ids_and_keys": {"mask": MASKS["ids"], "score": SCORES["keys"]},
    "softcap": {"mask": causal(), "score": softcap(30.0)},
    "sigmoid": {"mask": causal(), "normaliser": sigmoid_attention()},
    "sigmoid_half": {"score": SCORES["half"], "normaliser": sigmoid_attention()},
    "sigmoid_keys": {"score": SCORES["keys"], "normaliser": sigmoid_attention()},
}


def kernel_spec(
    name: str,
    head_dim: int | tuple[int, int] = 128,
    dtype: str = "bfloat16",
    precision: str | None = None,
) -> AttentionSpec:
    """The spec of one of these kernels."""
    return AttentionSpec(head_dim, dtype, input_precision=precision, **KERNELS[name])
