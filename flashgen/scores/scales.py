"""Score functions of the score alone: softcap and temperature."""

from __future__ import annotations

from typing import Any

from flashgen.arguments import label, positive
from flashgen.functions import tanh
from flashgen.params import Float, Tensor
from flashgen.scores.score import Score


def softcap(cap: float | Float | Tensor) -> Score:
    """Scores squashed into (-cap, cap), as ``cap * tanh(score / cap)``.

    Gemma 2 (https://arxiv.org/abs/2408.00118) caps at 50, Grok-1 at 30.

    Args:
        cap: a positive number, a `Float` with above=0 that the call chooses, or a float `Tensor`
            of dims ``("num_q_heads",)``.
    """
    limit = positive("softcap", "cap", cap)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return limit(b, h) * tanh(score / limit(b, h))

    return Score(score_mod, label("softcap", cap))


def temperature(value: float | Float | Tensor) -> Score:
    """Scores divided by a temperature: above 1 the weights are more even.

    Args:
        value: a positive number, a `Float` with above=0 that the call chooses, or a float `Tensor`
            of dims ``("num_q_heads",)``, ``("batch",)`` or both.
    """
    heat = positive("temperature", "value", value)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score / heat(b, h)

    return Score(score_mod, label("temperature", value))
