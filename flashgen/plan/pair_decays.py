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
from flashgen.spec import AttentionSpec
from flashgen.symbols import GROUP, KV_LEN, Q_FIRST, FloorDiv
from flashgen.tracing.expr import Expr

#: A logarithm below it is one of 0, to float32.
FORGETS = -111.0

#: A logarithm of a weight that is 0, whatever its product of features is.
LEAST = -256

#: Sums of the keys of a tile are never so far below that up to its first query.
FAR = -(2.0**30)

#: Weights grow by no more than the exponential of it: what is hidden shall not overflow.
GROWS = 60.0

LOG2_E = math.log2(math.e)

#: Arguments of the dense kernels: the sums up to each key in whole numbers, and what is left.
OF_WHOLE, OF_REST = "decay_whole", "decay_rest"


def decayed(decay: Decay, spec: AttentionSpec) -> Score:
    """The score function that multiplies a weight by its decays.

    Args:
        decay: of heads, or of keys.
        spec: whose decay it is. With "top_left" and more queries than keys, sums end at the last
            key.
    """
    exact = spec.dtype == "float32"
    of_pair = _of_keys(spec.align, exact=exact) if decay.tensor is not None else _of_heads(decay)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * of_pair(b, h, q_idx, kv_idx)

    return Score(score_mod, f"decay={decay.label}", equal_lengths=True)


def _of_keys(align: str | None, *, exact: bool) -> Callable[..., Any]:
    dims = ("batch", "num_q_heads", "kv_len")
    wholes, rests = Tensor(OF_WHOLE, dims, "int32"), Tensor(OF_REST, dims)

    def position(q_idx: Any) -> Any:
        return minimum(q_idx, Expr(KV_LEN) - 1) if align == "top_left" else q_idx

    def of_pair(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at, first = position(q_idx), wholes[b, h, position(Expr(Q_FIRST))]

        def beside(at: Any) -> Any:
            return maximum((wholes[b, h, at] - first) + rests[b, h, at], FAR)

        if exact:
            # None of the whole numbers is rounded; the maximum keeps sympy from mixing summands.
            whole = maximum(wholes[b, h, at] - wholes[b, h, kv_idx], LEAST)
            sums = whole + (rests[b, h, at] - rests[b, h, kv_idx])
        else:
            # One number for a query and one for a key, beside the first query of the tile: these
            # are small where weights are not 0, and their rounding is far below that of 16 bits.
            sums = beside(at) - beside(kv_idx)
        # A power of 2 has one instruction; that of e scales its argument and result besides.
        return exp2(minimum(sums, GROWS) * LOG2_E)

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
