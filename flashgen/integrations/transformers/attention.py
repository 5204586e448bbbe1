"""The attention function of the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.integrations.call_tensors import (
    autocast,
    padded,
    supported_head_dim,
)
from flashgen.integrations.transformers.described import DescribedMask, MaskKind
from flashgen.integrations.transformers.masks import CAUSAL
from flashgen.integrations.transformers.modules import module_of
from flashgen.integrations.transformers.recorded import TRUE
from flashgen.params import dtype_name

#: Arguments that layers pass, and that change nothing of what attention computes: positions have
#: entered the mask and the rotations already, and the others are for other parts of a model.
HARMLESS = frozenset(
    (
        "position_ids", "cache_position", "use_cache", "output_hidden_states",
        "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep",
        "deterministic", "kernel_options",
    )
)  # fmt: skip
#: Lengths of packed sequences, which are in the mask if there is one of these.
_PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))

_FULL = MaskKind(TRUE)
_CAUSAL = MaskKind(CAUSAL)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DescribedMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as a layer of transformers asks for it.

    Args:
        module: the layer; ``is_causal`` of it counts if there is no mask.
        query: (batch, num_q_heads, q_len, qk_head_dim).
        key: (batch, num_kv_heads, kv_len, qk_head_dim).
        value: (batch, num_kv_heads, kv_len, v_head_dim).
        attention_mask: what the registered mask function returned, or four dimensions of bools
            (True: is seen) or of floats, which are added to the scores.
        dropout: the probability that a weight is dropped.
        scaling: factor on ``query @ key.T``; None is ``qk_head_dim ** -0.5``.
        is_causal: whether a query sees no key after itself, if there is no mask.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: a sink for each head of queries.
        position_bias: float, (1 or batch, 1 or num_q_heads, q_len, kv_len), added to the scores.
        sliding_window: the mask has it already.
        output_attentions: refused: no kernel keeps the weights.
        kwargs: others that are None or known not to matter; any other raises.

    Returns:
        (batch, q_len, num_q_heads, v_head_dim), and None for the weights.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is accepted.
    """
    asked = getattr(getattr(module, "config", None), "output_attentions", False)
    if output_attentions or asked:
        raise ValueError(
            "output_attentions: no weights are kept; load the model with "
            "attn_implementation='eager' to get them"
        )
    _check_others(kwargs, attention_mask)
    query, key, value = autocast(query, key, value)
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        seen = _without_mask(query, key, causal, sliding_window)
    elif isinstance(attention_mask, DescribedMask):
        _check_sizes(attention_mask, query, key)
        learns = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, key, value, s_aux)
        )
        cached = not learns and position_bias is None and dropout == 0
        seen = _described(attention_mask, cached=cached)
    else:
        seen = _elements(attention_mask, query, key)
    if seen.bias is not None:
        position_bias = seen.bias if position_bias is None else position_bias + seen.bias
    if seen.valid is not None and seen.valid < key.shape[2]:
        key, value = key[:, :, : seen.valid], value[:, :, : seen.valid]
        position_bias = None if position_bias is None else position_bias[..., : seen.valid]
    options = seen.options
    bias_kind = None
    if position_bias is not None:
        bias_kind = _bias_kind(position_bias, query)
        options["bias"] = position_bias.expand(-1, -1, query.shape[2], key.shape[2])
    if s_aux is not None:
        options["sinks"] = s_aux.reshape(-1)
    if dropout != 0:
        options["dropout_p"] = dropout
    width, v_width = query.shape[-1], value.shape[-1]
    head_dims = (supported_head_dim(width), supported_head_dim(v_width))
    found = module_of(
        mask=seen.kind,
        head_dims=head_dims,
        dtype=dtype_name(query.dtype),
        softcap=softcap,
        bias=bias_kind,
        sinks=s_aux is not None,
        dropout=dropout != 0,
        device=query.device,
    )
    scale = width**-0.5 if scaling is None else scaling
    q, k = padded(_rows(query), head_dims[0]), padded(_rows(key), head_dims[0])
    v = padded(_rows(value), head_dims[1])
    if seen.kv_lens is None:
        out = found.attention(q, k, v, scale=scale, **options).transpose(1, 2)
    else:
        q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
        options = {name: _detached(x) for name, x in options.items()}
        out = found.cache_attention(q, k, v, seen.kv_lens, scale=scale, **options)
    return out[..., :v_width].contiguous(), None


@dataclass
class _Seen:
    """What queries see, for a module.

    Attributes:
        kind: of the mask.
        options: arguments of the module.
        valid: how many keys are given to it; None for all.
        bias: what is added to the scores besides.
        kv_lens: the keys of each sequence, for the cache kernels; None for the others.
    """

    kind: MaskKind
    options: dict[str, Any]
    valid: int | None = None
    bias: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None


def _without_mask(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, window: int | None
) -> _Seen:
    """What sdpa's attention function takes no mask for."""
    if window is not None and window < key.shape[2]:
        raise ValueError(
            f"sliding_window: got {window} for {key.shape[2]} keys, and no mask that has it"
        )
    if not is_causal or query.shape[2] == 1:
        return _Seen(_FULL, {})
    # Keys behind the last query, as of an empty static cache, are not written yet.
    return _Seen(_CAUSAL, {}, valid=min(query.shape[2], key.shape[2]))


def _described(mask: DescribedMask, *, cached: bool) -> _Seen:
    """What a description says, for the cache kernels where it can be."""
    options: dict[str, Any] = dict(zip(mask.kind.numbers, mask.numbers, strict=True))
    options.update((x.name, table) for x, table in zip(mask.kind.tensors, mask.tables, strict=True))
    if cached and mask.kv_lens is not None:
        return _Seen(mask.kind, options, kv_lens=mask.kv_lens)
    if mask.valid is None:  # the device alone knows how many keys there are, and queries are few
        return _Seen(_FULL, {}, bias=_added(mask.to_dense()))
    for tensor in mask.kind.tensors:
        for i, dim in enumerate(tensor.dims):
            if dim == "kv_len" and mask.valid < mask.size[3]:
                options[tensor.name] = options[tensor.name].narrow(i, 0, mask.valid)
    return _Seen(mask.kind, options, valid=mask.valid)


def _elements(mask: Any, query: torch.Tensor, key: torch.Tensor) -> _Seen:
    """What a tensor says about each query and key."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        given = f"{mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else type(mask)
        raise TypeError(f"attention_mask: got {given}; pass (batch, heads, q_len, kv_len)")
    mask = mask[..., : key.shape[2]]
    if mask.is_floating_point():
        return _Seen(_FULL, {}, bias=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask: got {mask.dtype}; pass bools, or floats that are added")
    return _Seen(_FULL, {}, bias=_added(mask))


def _added(seen: torch.Tensor) -> torch.Tensor:
    """What added to scores hides what is not seen; 16 bits are enough for that."""
    return torch.where(seen, 0.0, float("-inf")).to(torch.bfloat16)


def _check_others(given: dict[str, Any], mask: Any) -> None:
    """Raises for an argument that may change the result and that is not known here."""
    for name, value in given.items():
        if value is None or name in HARMLESS:
            continue
        if name in _PACKED:
            if isinstance(mask, DescribedMask) and any(x.in_order for x in mask.kind.tensors):
                continue
            raise ValueError(
                f"{name}: packed sequences are read from position_ids, without attention_mask and "
                "without a cache; the mask of this call has none"
            )
        raise ValueError(f"{name}: flashgen does not know what attention does with it; pass None")


def _check_sizes(mask: DescribedMask, query: torch.Tensor, key: torch.Tensor) -> None:
    batch, _, q_len, kv_len = mask.size
    if (batch, q_len, kv_len) != (query.shape[0], query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask: it is for batch {batch}, {q_len} queries and {kv_len} keys, and "
            f"query and key have {query.shape[0]}, {query.shape[2]} and {key.shape[2]}"
        )


def _bias_kind(bias: torch.Tensor, query: torch.Tensor) -> tuple[int | str, int | str, str]:
    """The kind of what is added to the scores."""
    batch, heads = query.shape[0], query.shape[1]
    if bias.dim() != 4 or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"position_bias: got {tuple(bias.shape)}; pass (1 or {batch}, 1 or {heads}, q_len, "
            "kv_len)"
        )
    return (
        1 if bias.shape[0] == 1 else "batch",
        1 if bias.shape[1] == 1 else "num_q_heads",
        dtype_name(bias.dtype),
    )


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
