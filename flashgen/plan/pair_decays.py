"""Decays of kernels over all pairs: a factor of each weight, as a score function has it.

Between a key and a query the decays behind the key, up to the query's position, are multiplied. Of
numbers of heads that is a power by the distance. Of numbers of keys calls make the sums up to each
key, in two parts whose differences are exact: whole numbers, and what is left of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashgen.decays import Decay
from flashgen.functions import exp2, maximum, minimum, where
from flashgen.params import Tensor
from flashgen.scores import Score
from flashgen.symbols import GROUP, KV_LEN, FloorDiv
from flashgen.tracing.expr import Expr

#: A logarithm below it is one of 0, to float32.
FORGETS = -111.0

#: A logarithm of a weight that is 0, whatever its product of features is.
LEAST = -256

#: Weights grow by no more than the exponential of it: what is hidden shall not overflow.
GROWS = 60.0

LOG2_E = math.log2(math.e)

#: Arguments of the dense kernels: the sums up to each key in whole numbers, and what is left.
OF_WHOLE, OF_REST = "decay_whole", "decay_rest"


def decayed(decay: Decay, align: str | None) -> Score:
    """The score function that multiplies a weight by its decays.

    Args:
        decay: of heads, or of keys.
        align: the spec's; with more queries than keys, sums end at the last key.
    """
    of_pair = _of_keys(align) if decay.tensor is not None else _of_heads(decay)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * of_pair(b, h, q_idx, kv_idx)

    return Score(score_mod, f"decay={decay.label}", equal_lengths=True)


def _of_keys(align: str | None) -> Callable[..., Any]:
    dims = ("batch", "num_q_heads", "kv_len")
    wholes, rests = Tensor(OF_WHOLE, dims, "int32"), Tensor(OF_REST, dims)

    def of_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = minimum(q_idx, Expr(KV_LEN) - 1) if align == "top_left" else q_idx
        # None of the whole numbers is rounded; the maximum keeps sympy from mixing the summands.
        whole = maximum(wholes[b, h, at] - wholes[b, h, kv_idx], LEAST)
        sums = minimum(whole + (rests[b, h, at] - rests[b, h, kv_idx]), GROWS)
        # A power of 2 has one instruction; that of e scales its argument and result besides.
        return exp2(sums * LOG2_E)

    return of_pair


def _of_heads(decay: Decay) -> Callable[..., Any]:
    def number(h: Any) -> Any:
        if decay.function is not None:
            return decay.function(h)
        chosen: Any = decay.numbers[-1]
        for i, each in reversed(tuple(enumerate(decay.numbers[:-1]))):
            chosen = where(h == i, each, chosen)
        return chosen

    def of_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = maximum(q_idx - kv_idx, 0)
        return exp2(maximum(number(Expr(FloorDiv(h.sym, GROUP))), FORGETS) * LOG2_E * distance)

    return of_pair
