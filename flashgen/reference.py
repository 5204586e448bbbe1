"""attention_reference: the eager oracle that every kernel is compared with.

It shares no code with the generated kernels: it runs the user's functions on index tensors, not
their traced expressions, and computes in float64 unless another dtype is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashgen.constants import Constant
from flashgen.decays import Decay
from flashgen.declared import Param
from flashgen.masks import Mask, MaskMod, as_mask
from flashgen.normalisers import Linear, Normaliser, softmax
from flashgen.philox import kept, kept_scale
from flashgen.scores import Score, ScoreMod, as_score
from flashgen.tracing.expr import as_condition, bound, concrete

if TYPE_CHECKING:
    import torch

#: The arguments of a call by name: ints, floats and tensors.
Values = Mapping[str, Any]


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | MaskMod,
    *,
    score: Score | ScoreMod | None = None,
    normaliser: Normaliser | None = None,
    scale: float | None = None,
    params: Values | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(score(scale * q @ k.T), where visible) @ v``, in full precision.

    Of linear attention ``scale * phi(q) @ phi(k).T``, where visible, over its sums, with decays of
    heads or of keys.

    Args:
        q: (batch, num_q_heads, q_len, qk_head_dim).
        k: (batch, num_kv_heads, kv_len, qk_head_dim). num_kv_heads divides num_q_heads; query head
            i attends to key head ``i // (num_q_heads // num_kv_heads)``.
        v: (batch, num_kv_heads, kv_len, v_head_dim).
        mask: which keys a query sees.
        score: the score function, applied to ``scale * q·k``; None changes nothing.
        normaliser: how scores become weights; None is `softmax`.
        scale: None is ``qk_head_dim ** -0.5``.
        params: values of the declared parameters by name; missing ones take their default.
            ``dropout_p``, the share of dropped weights, comes with a ``seed``; random features with
            their ``matrix``, (features, qk_head_dim).
        dtype: the dtype of the computation and the results; None is float64. The user's functions
            compute in float32 at least.
        return_lse: also return the log of the sum of a row's unnormalised weights, the sink's
            included: of exp(score), of sigmoid(score), or of products of features.

    Returns:
        (batch, num_q_heads, q_len, v_head_dim); with ``return_lse`` also
        (batch, num_q_heads, q_len), in natural log. A row that sees no key is 0; its LSE is the
        sink, or -inf without one. A key whose score is -inf is not seen.

    Raises:
        ValueError: a parameter has no value, or the mask or the score demands equal lengths and
            they differ; or each feature has decays.
    """
    import torch

    dtype = dtype or torch.float64
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    queries = q.to(dtype)

    if isinstance(normaliser, Linear):
        queries, keys = (_features(x, normaliser, scale, params) for x in (queries, keys))
        products = queries @ keys.transpose(-1, -2)
        products = products if normaliser.feature_map.random else products * scale
        if normaliser.decay is not None:
            products = products * _decays(products, as_mask(mask), normaliser.decay, group, params)
        weights, lse = _products(products, mask, normaliser, params)
        out = weights @ values
        return (out, lse) if return_lse else out
    scores = final_scores(queries @ keys.transpose(-1, -2) * scale, mask, score, params=params)
    weights, lse = weigh(scores, normaliser, params=params)
    out = dropped(weights, params) @ values
    return (out, lse) if return_lse else out


def final_scores(
    scores: torch.Tensor,
    mask: Mask | MaskMod,
    score: Score | ScoreMod | None = None,
    *,
    params: Values | None = None,
) -> torch.Tensor:
    """The scores that weights are computed from: the score function's results, -inf if hidden.

    Args:
        scores: scale * q·k, (batch, num_q_heads, q_len, kv_len).
        mask: which keys a query sees.
        score: the score function; None changes nothing.
        params: values of the declared parameters by name; missing ones take their default.

    Raises:
        ValueError: as `attention_reference`.
    """
    import torch

    visible = visibility(mask, *scores.shape, params=params, device=scores.device)
    if score is not None and scores.numel():
        score = as_score(score)
        _check_lengths(score, *scores.shape[2:])
        values = _values(score, score.params, params, scores)
        given = scores.to(_precision(scores))
        with _computing(values, scores):
            result = concrete(score.score_mod(given, *positions(scores.shape, scores.device)))
        scores = torch.broadcast_to(torch.as_tensor(result).to(scores), scores.shape)
    return scores.masked_fill(~visible | (scores == float("-inf")), float("-inf"))


def weigh(
    scores: torch.Tensor, normaliser: Normaliser | None = None, *, params: Values | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the values, and the log of the sum that they were divided by.

    Args:
        scores: (batch, num_q_heads, q_len, kv_len), -inf where a key is not seen.
        normaliser: None is `softmax`.
        params: values of the declared parameters by name; missing ones take their default.

    Returns:
        The weights, in the scores' shape, and the LSE, (batch, num_q_heads, q_len); for a sigmoid,
        which has no divisor, the log of the sum of the weights.

    Raises:
        ValueError: a parameter has no value, or the normaliser is `linear`.
    """
    import torch

    normaliser = normaliser or softmax()
    if normaliser.kind == "linear":
        raise ValueError(
            "normaliser: linear attention has no scores to weigh; call attention_reference"
        )
    if normaliser.kind == "sigmoid":
        lse = torch.logsumexp(torch.nn.functional.logsigmoid(scores), dim=-1)
        return torch.sigmoid(scores), lse
    everything = scores
    if normaliser.sink is not None:
        b, h, _, _ = positions(scores.shape, scores.device)
        with _computing(_values(normaliser, normaliser.params, params, scores), scores):
            sink = torch.as_tensor(concrete(normaliser.sink(b, h))).to(scores)
        # The sink is one more key, whose value is 0.
        everything = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(everything, dim=-1)
    # A row without keys is -inf throughout: subtracting 0 instead of its LSE gives weights of 0.
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)), lse


def _features(
    x: torch.Tensor, normaliser: Linear, scale: float, params: Values | None
) -> torch.Tensor:
    """What a feature map makes of the last dimension; random features without their factors."""
    import torch

    feature_map = normaliser.feature_map
    if feature_map.random:
        x = x * scale**0.5
        exponents = x @ (params or {})["matrix"].to(x).mT - 0.5 * (x * x).sum(-1, keepdim=True)
        return torch.exp(exponents)
    with bound({}):
        made = feature_map.function(x)
        pieces = made if isinstance(made, list | tuple) else [made]
        tensors = [torch.as_tensor(concrete(piece)).to(x) for piece in pieces]
    return torch.cat([tensor.broadcast_to(x.shape) for tensor in tensors], dim=-1)


def _decays(
    products: torch.Tensor, mask: Mask, decay: Decay, group: int, params: Values | None
) -> torch.Tensor:
    """What decays multiply weights by: those behind a key, up to a query's position."""
    import torch

    _, heads, q_len, kv_len = products.shape
    if decay.features:
        raise ValueError("normaliser: each feature has decays; call its module's reference")
    if decay.tensor is not None:
        logs = (params or {})[decay.tensor.name].to(products.dtype)
    else:
        of_heads = [_decay_of(decay, h) for h in range(heads // group)]
        logs = torch.tensor(of_heads, dtype=products.dtype, device=products.device)
        logs = logs[None, :, None].expand(1, -1, kv_len)
    sums = logs.clamp(min=-1000.0).cumsum(-1).repeat_interleave(group, dim=1)
    first = kv_len - q_len if mask.align == "bottom_right" else 0
    at = first + torch.arange(q_len, device=products.device)
    later = torch.arange(kv_len, device=products.device) > at[:, None]
    of_queries = sums[..., at.clamp(0, max(kv_len - 1, 0))]
    between = of_queries[..., :, None] - sums[..., None, :]
    return torch.exp(between.masked_fill(later, 0.0))


def _decay_of(decay: Decay, h: int) -> float:
    if decay.numbers:
        return decay.numbers[h]
    assert decay.function is not None
    with bound({}):
        return float(concrete(decay.function(h)))


def _products(
    weights: torch.Tensor, mask: Mask | MaskMod, normaliser: Linear, params: Values | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of features as weights of what a mask shows, and the log of their sums."""
    seen = visibility(mask, *weights.shape, params=params, device=weights.device)
    weights = weights.masked_fill(~seen, 0.0)
    sums = weights.sum(-1)
    none = (sums == 0)[..., None]
    lse = sums.log()
    if normaliser.normalise:
        weights = (weights / sums[..., None].masked_fill(none, 1.0)).masked_fill(none, 0.0)
    return weights, lse


def dropped(weights: torch.Tensor, params: Values | None = None) -> torch.Tensor:
    """Weights, (batch, num_q_heads, q_len, kv_len), after dropout, with kept ones scaled.

    Args:
        weights: what `weigh` returns.
        params: ``dropout_p``, 0 where it is missing, and ``seed``; of a part of a whole its
            offsets, see `flashgen.offsets`.
    """
    params = params or {}
    dropout_p = params.get("dropout_p", 0.0)
    if dropout_p == 0:
        return weights
    first = (0, *(params.get(name, 0) for name in ("head_offset", "q_offset", "kv_offset")))
    keeps = kept(weights.shape, dropout_p, params["seed"], weights.device, first)
    remaining: torch.Tensor = weights.masked_fill(~keeps, 0.0) * kept_scale(dropout_p)
    return remaining


def visibility(
    mask: Mask | MaskMod,
    batch: int,
    num_q_heads: int,
    q_len: int,
    kv_len: int,
    *,
    params: Values | None = None,
    device: Any = None,
) -> torch.Tensor:
    """The mask as a boolean tensor that broadcasts to (batch, num_q_heads, q_len, kv_len).

    Raises:
        ValueError: a parameter has no value, or the mask demands equal lengths and they differ.
    """
    import torch

    mask = as_mask(mask)
    _check_lengths(mask, q_len, kv_len)
    values = _values(mask, mask.params, params)
    visible = torch.zeros((q_len, kv_len), dtype=torch.bool, device=device)
    if not batch * num_q_heads * q_len * kv_len:
        return visible  # and no tensor element to read
    sizes = {"num_q_heads": num_q_heads, "q_len": q_len, "kv_len": kv_len}
    with bound({**values, **sizes}):
        indices = positions((batch, num_q_heads, q_len, kv_len), device)
        seen: torch.Tensor = concrete(as_condition(mask.mask_mod(*indices))) | visible
    return seen


def positions(shape: Sequence[int], device: Any = None) -> tuple[torch.Tensor, ...]:
    """b, h, q_idx and kv_idx as index tensors that broadcast to the scores.

    Args:
        shape: the scores': (batch, num_q_heads, q_len, kv_len).
        device: where the tensors go.
    """
    import torch

    return tuple(
        torch.arange(size, device=device).reshape(-1, *(1,) * after)
        for size, after in zip(shape, (3, 2, 1, 0), strict=True)
    )


def _check_lengths(function: Mask | Score, q_len: int, kv_len: int) -> None:
    if function.equal_lengths and q_len != kv_len:
        raise ValueError(f"{function.label} needs q_len == kv_len, got {q_len} and {kv_len}")


def _values(
    function: Mask | Score | Normaliser,
    declared: tuple[Param, ...],
    params: Values | None,
    scores: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The value of each parameter by name, floating-point tensors as precise as ``scores``."""
    chosen = (param for param in declared if not isinstance(param, Constant))
    given = {p.name: (params or {}).get(p.name, p.default) for p in chosen}
    if missing := sorted(name for name, value in given.items() if value is None):
        raise ValueError(f"{function.label} needs a value for {', '.join(missing)}")
    if scores is None:
        return given
    return {
        name: value.to(_precision(scores))
        if hasattr(value, "is_floating_point") and value.is_floating_point()
        else value
        for name, value in given.items()
    }


@contextmanager
def _computing(values: Values, scores: torch.Tensor) -> Iterator[None]:
    """Parameters take these values, and integers in ``2.0 ** h`` become precise enough floats."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(_precision(scores))
    try:
        with bound({**values, "q_len": scores.shape[2], "kv_len": scores.shape[3]}):
            yield
    finally:
        torch.set_default_dtype(before)


def _precision(scores: torch.Tensor) -> torch.dtype:
    """The dtype that a score function computes in: the scores', but float32 at least."""
    import torch

    return torch.promote_types(scores.dtype, torch.float32)
