"""Score functions, applied to `scale * q @ k.T` before the softmax.

A score function is any function ``(score, b, h, q_idx, kv_idx) -> number``: the signature of
FlexAttention's ``score_mod``. The ones here are such functions and nothing more.
"""

from flashgen.scores.biases import additive_bias, alibi, relative_bias, t5_bias
from flashgen.scores.scales import softcap, temperature
from flashgen.scores.score import Score, ScoreMod, as_score

__all__ = [
    "Score",
    "ScoreMod",
    "additive_bias",
    "alibi",
    "as_score",
    "relative_bias",
    "softcap",
    "t5_bias",
    "temperature",
]
