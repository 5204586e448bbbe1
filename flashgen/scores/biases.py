"""Score functions that add a bias: by the distance of query and key, or from a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashgen.arguments import (
    PER_HEAD,
    PerHead,
    check_dims,
    declared,
    entry,
    label,
    per_head,
    shift,
    whole,
)
from flashgen.errors import MaskError
from flashgen.functions import clamp, exp2, log, maximum, minimum, truncate, where
from flashgen.params import Tensor
from flashgen.scores.score import Score
from flashgen.tracing.expr import Expr


def alibi(slopes: int | Tensor, *, bidirectional: bool = False, align: str | None = None) -> Score:
    """Adds ``slope[h] * (kv - q)`` to a score: the farther back a key, the smaller its weight.

    Attention with linear biases (Press et al. 2022, https://arxiv.org/abs/2108.12409), made for
    causal masks.

    Args:
        slopes: the number of query heads, for the slopes of the paper and its code: powers of
            2 ** (-8 / heads) if the number is a power of two, otherwise the slopes for the power of
            two below it, then every other slope for the power of two above. Or a float `Tensor` of
            dims ``("num_q_heads",)``.
        bidirectional: take the distance either way, ``-slope[h] * abs(kv - q)``: for encoders.
        align: which key is at a query's own position when q_len and kv_len differ; see
            `flashgen.masks.causal`.
    """
    if isinstance(slopes, Tensor) and slopes.is_float:
        slope = per_head("alibi", "slopes", slopes)
    elif isinstance(slopes, int) and not isinstance(slopes, bool) and slopes >= 1:
        slope = _alibi_slope(slopes)
    else:
        raise MaskError(
            f"alibi: slopes={slopes!r}; give the number of query heads or a Tensor of floats"
        )
    offset = shift(align)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = kv_idx - (q_idx + offset)
        return score + slope(b, h) * (-abs(distance) if bidirectional else distance)

    either = "bidirectional=True" if bidirectional else None
    name = label("alibi", slopes, either, align=align)
    return Score(score_mod, name, equal_lengths=align is None, align=align)


def _alibi_slope(num_q_heads: int) -> PerHead:
    """``get_slopes`` in the repository of ALiBi's authors, in closed form."""
    power = 2 ** (num_q_heads.bit_length() - 1)
    if power == num_q_heads:
        return lambda b, h: exp2((h + 1) * (-8 / power))
    return lambda b, h: exp2(
        where(h < power, (h + 1) * (-8 / power), (2 * (h - power) + 1) * (-4 / power))
    )


def relative_bias(
    max_distance: int | Expr, table: Tensor | None = None, *, align: str | None = None
) -> Score:
    """Adds ``table[h, distance + max_distance]``, where distance is kv - q, clipped.

    A learned number for each head and distance; distances are clipped to max_distance, as in Shaw
    et al. 2018 (https://arxiv.org/abs/1803.02155).

    Args:
        max_distance: a number, or an `Int` that the call chooses; keys farther away share the
            bias of the last distance on their side.
        table: float, with one dimension of ``2 * max_distance + 1``, and ``"num_q_heads"`` or
            ``"batch"`` before or after it. None declares ``relative_bias`` of dims
            ``("num_q_heads", 2 * max_distance + 1)``.
        align: which key is at a query's own position when q_len and kv_len differ; see
            `flashgen.masks.causal`.
    """
    if isinstance(max_distance, Tensor):
        raise MaskError(f"relative_bias: max_distance={max_distance!r}; give a number or an Int")
    reach = whole("relative_bias", "max_distance", max_distance, least=1)
    size = 2 * max_distance + 1
    doc = "The bias of each head and distance kv - q, from -max_distance up."
    own = Tensor("relative_bias", ("num_q_heads", size), doc=doc) if table is None else table
    bias = _lookup("relative_bias", own, size)
    offset = shift(align)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        farthest = reach(b, h)
        distance = clamp(kv_idx - (q_idx + offset), -farthest, farthest)
        return score + bias(b, h, distance + farthest)

    name = label("relative_bias", max_distance, table, align=align)
    return Score(score_mod, name, equal_lengths=align is None, align=align)


def t5_bias(
    table: Tensor | None = None,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    align: str | None = None,
) -> Score:
    """Adds ``table[bucket, h]``: T5's bias, whose buckets widen with the distance.

    Raffel et al. 2020 (https://arxiv.org/abs/1910.10683, section 2.1), with the buckets of its
    code. T5 does not scale q·k: declare its specs with ``scale=1.0``.

    Args:
        table: float, of dims ``num_buckets`` and ``"num_q_heads"`` in either order, such as
            ``relative_attention_bias.weight`` of Hugging Face's T5. None declares
            ``relative_attention_bias`` of dims ``(num_buckets, "num_q_heads")``.
        num_buckets: even if bidirectional; half the buckets of a direction hold one distance each.
        max_distance: keys at this distance or farther share the last bucket.
        bidirectional: as in an encoder: keys after the query have the upper half of the buckets.
            In a decoder all buckets are for keys before the query.
        align: which key is at a query's own position when q_len and kv_len differ; see
            `flashgen.masks.causal`.
    """
    known = all(type(number) is int for number in (num_buckets, max_distance))
    buckets = (num_buckets // 2 if bidirectional else num_buckets) if known else 0
    if buckets < 2 or (bidirectional and num_buckets % 2) or max_distance <= buckets // 2:
        raise MaskError(
            f"t5_bias: num_buckets={num_buckets!r} max_distance={max_distance!r}; give an even "
            "number of buckets from 4 up, and a distance above a quarter of it (bidirectional) or "
            "a half"
        )
    doc = "The bias of each bucket of distances and each head."
    own = Tensor("relative_attention_bias", (num_buckets, "num_q_heads"), doc=doc)
    bias = _lookup("t5_bias", own if table is None else table, num_buckets)
    offset = shift(align)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        ahead = kv_idx - (q_idx + offset)
        distance = abs(ahead) if bidirectional else maximum(-ahead, 0)
        bucket = _t5_bucket(distance, buckets, max_distance)
        later = where(ahead > 0, buckets, 0) if bidirectional else 0
        return score + bias(b, h, bucket + later)

    chosen = (f"num_buckets={num_buckets}", f"max_distance={max_distance}")
    direction = None if bidirectional else "bidirectional=False"
    name = label("t5_bias", table, *chosen, direction, align=align)
    return Score(score_mod, name, equal_lengths=align is None, align=align)


def _t5_bucket(distance: Any, buckets: int, max_distance: int) -> Any:
    """The bucket of a distance >= 0: one distance each in the first half, then equal ratios."""
    exact = buckets // 2
    widening = buckets - exact
    ratio = max_distance / exact
    # A bucket begins at the first whole distance at or above its bound. Adding less than the least
    # gap from a whole number up to a bound changes no bucket, and moves every distance away from
    # the bounds, so that no rounding of the logarithm decides.
    bounds = [exact * ratio ** (i / widening) for i in range(1, widening)]
    above = [bound % 1 for bound in bounds if abs(bound - round(bound)) > 1e-6]
    nudge = min(above, default=1.0) / 2
    logarithm = log((distance + nudge) / exact) * (widening / math.log(ratio))
    return where(distance < exact, distance, minimum(exact + truncate(logarithm), buckets - 1))


def additive_bias(bias: Tensor | None = None) -> Score:
    """Adds ``bias[b, h, q, kv]``: any tensor of biases, -inf for hidden keys.

    Args:
        bias: float, its dimensions any of ``"batch"``, ``"num_q_heads"``, ``"q_len"``, ``"kv_len"``
            and 1, as many as it has: ``("num_q_heads", "q_len", "kv_len")``, ``("batch", 1, 1,
            "kv_len")``. None declares ``bias`` with all four.
    """
    names = ("batch", "num_q_heads", "q_len", "kv_len")
    example = f"Tensor('bias', {names})"
    given = Tensor("bias", names, doc="Added to the scores.") if bias is None else bias
    tensor = declared("additive_bias", "bias", given, example)
    if not tensor.is_float:
        raise MaskError(f"additive_bias: bias={tensor!r}; declare it with a float dtype")
    check_dims("additive_bias", "bias", tensor, names)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + entry(tensor, batch=b, num_q_heads=h, q_len=q_idx, kv_len=kv_idx)

    return Score(score_mod, label("additive_bias", bias), moves=False)


def _lookup(owner: str, given: Any, size: int | Expr) -> Callable[[Any, Any, Any], Any]:
    """``(b, h, index) -> element`` of a table; the index is for its only dimension without a name.

    Args:
        owner: the score that reads the table, for the error.
        given: the table.
        size: the number of values of the index.

    Raises:
        MaskError: the tensor is no such table, or is known to have another size.
    """
    table = declared(owner, "table", given, f"Tensor('bias', ('num_q_heads', {size}))")
    names = table.names
    others = [i for i, name in enumerate(names) if name not in (*PER_HEAD, "1")]
    if not table.is_float or len(others) != 1 or len(set(names)) < len(names):
        raise MaskError(
            f"{owner}: table={table!r}; declare it with a float dtype, one dimension for the "
            f"distances, and {' or '.join(PER_HEAD)} beside it"
        )
    entries = table.dims[others[0]]
    known = isinstance(size, int) and entries is not None and entries.sym.is_Integer
    if known and str(entries) != str(size):
        raise MaskError(
            f"{owner}: table={table!r}; declare it with {size} entries in place of {entries}"
        )

    def element(b: Any, h: Any, index: Any) -> Any:
        at = {"batch": b, "num_q_heads": h, "1": 0}
        return table[tuple(at.get(name, index) for name in names)]

    return element
