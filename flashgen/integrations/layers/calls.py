"""A layer's call of attention: what queries see, and the module's call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.integrations.call_tensors import padded, supported_head_dim
from flashgen.integrations.layers.described import DescribedMask, MaskKind
from flashgen.integrations.layers.modules import module_of
from flashgen.integrations.layers.padding import padding
from flashgen.integrations.layers.recorded import CAUSAL, TRUE
from flashgen.integrations.layers.rows import FEW, Rows, rows, rows_once
from flashgen.params import dtype_name

_FULL = MaskKind(TRUE)
_CAUSAL = MaskKind(CAUSAL)


@dataclass
class Seen:
    """What queries see, for a module.

    Attributes:
        kind: of the mask.
        options: arguments of the module.
        valid: how many keys are given to it; None for all.
        bias: what is added to the scores besides.
    """

    kind: MaskKind
    options: dict[str, Any]
    valid: int | None = None
    bias: torch.Tensor | None = None


def everything() -> Seen:
    """All keys."""
    return Seen(_FULL, {})


def from_the_first_key(query: torch.Tensor, key: torch.Tensor) -> Seen:
    """Query i sees the keys up to key i, as by sdpa's ``is_causal``."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len > kv_len:
        return Seen(_FULL, {}, bias=_added(query.new_ones(1, 1, q_len, kv_len).tril().bool()))
    return Seen(_CAUSAL, {}, valid=q_len)


def of_description(mask: DescribedMask, query: torch.Tensor, key: torch.Tensor) -> Seen:
    """What a description says, for the dense kernels; see `decode` for those of a cache.

    Args:
        mask: it.
        query: (batch, num_q_heads, q_len, head_dim).
        key: (batch, num_kv_heads, kv_len, head_dim).
    """
    _check_size(mask, query, key)
    if mask.valid is None:  # the device alone knows how many keys there are, and queries are few
        return Seen(_FULL, {}, bias=_added(mask.to_dense()))
    mask, kv_len = mask.bounded(), key.shape[2]
    assert mask.valid is not None
    options = mask.options()
    for tensor in mask.kind.tensors:
        for i, dim in enumerate(tensor.dims):
            if dim == "kv_len" and mask.valid < kv_len:
                options[tensor.name] = options[tensor.name].narrow(i, 0, mask.valid)
    return Seen(mask.kind, options, valid=mask.valid)


def _check_size(mask: DescribedMask, query: torch.Tensor, key: torch.Tensor) -> None:
    batch, _, q_len, kv_len = mask.size
    q_shape, k_shape = query.shape, key.shape
    if (batch, q_len, kv_len) != (q_shape[0], q_shape[2], k_shape[2]):
        raise ValueError(
            f"attention_mask: it is for batch {batch}, {q_len} queries and {kv_len} keys, and "
            f"query and key have {q_shape[0]}, {q_shape[2]} and {k_shape[2]}"
        )


def of_elements(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Seen:
    """What a tensor of four dimensions says about each query and key.

    Bools that say the same for all queries, and else those of more than a few queries, become
    bounds; the others, and floats, are added to the scores.
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        given = f"{mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else type(mask)
        raise TypeError(f"attention_mask: got {given}; pass (batch, heads, q_len, kv_len)")
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise TypeError(f"attention_mask: got {mask.dtype}; pass bools, or floats that are added")
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if mask.shape[3] == 1:
        mask = mask.expand(-1, -1, -1, kv_len)
    fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[3] >= kv_len
    found: Rows | None = None
    if mask.dtype == torch.bool and fits and q_len > FEW:
        if mask.shape[1:3] == (1, 1):
            found = padding(mask[:, 0, 0, :kv_len].expand(batch, kv_len), kv_len, look=True)
        elif mask.shape[2] == q_len:
            found = rows_once(mask) if mask.shape[3] == kv_len else rows(mask[..., :kv_len])
    if found is not None:
        node, kinds, tables = found
        options = {kind.name: table for kind, table in zip(kinds, tables, strict=True)}
        return Seen(MaskKind(node, tuple(kinds)), options)
    mask = mask[..., :kv_len]
    return Seen(_FULL, {}, bias=mask if mask.is_floating_point() else _added(mask))


def _added(seen: torch.Tensor) -> torch.Tensor:
    """What added to scores hides what is not seen; 16 bits are enough for that."""
    return torch.where(seen, 0.0, float("-inf")).to(torch.bfloat16)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    *,
    scale: float | None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention, by the module for the call.

    Args:
        query: (batch, num_q_heads, q_len, qk_head_dim).
        key: (batch, num_kv_heads, kv_len, qk_head_dim).
        value: (batch, num_kv_heads, kv_len, v_head_dim).
        seen: what queries see.
        scale: factor on ``query @ key.T``; None is ``qk_head_dim ** -0.5``.
        dropout: the probability that a weight is dropped.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: the logit of a key without a value, for each head of queries.
        bias: float, (1 or batch, 1 or num_q_heads, 1 or q_len, 1 or kv_len), added to the scores.

    Returns:
        (batch, q_len, num_q_heads, v_head_dim), contiguous.
    """
    if seen.bias is not None:
        bias = seen.bias if bias is None else bias + seen.bias
    if seen.valid is not None and seen.valid < key.shape[2]:
        bias = None if bias is None else bias.expand(-1, -1, -1, key.shape[2])[..., : seen.valid]
        key, value = key[:, :, : seen.valid], value[:, :, : seen.valid]
    options = seen.options
    bias_kind = None
    if bias is not None:
        bias_kind = _bias_kind(bias, query)
        if bias.shape[-1] == key.shape[2] and bias.stride(-1) != 1:
            # Kernels read rows, and are not compiled once more for what else there is.
            bias = bias.clone(memory_format=torch.contiguous_format)
        options["bias"] = bias.expand(-1, -1, query.shape[2], key.shape[2])
    if sinks is not None:
        options["sinks"] = sinks.reshape(-1)
    if dropout != 0:
        options["dropout_p"] = dropout
    width, v_width = query.shape[-1], value.shape[-1]
    head_dims = (supported_head_dim(width), supported_head_dim(v_width))
    module = module_of(
        mask=seen.kind,
        head_dims=head_dims,
        dtype=dtype_name(query.dtype),
        softcap=softcap,
        bias=bias_kind,
        sinks=sinks is not None,
        dropout=dropout != 0,
        device=query.device,
    )
    scale = width**-0.5 if scale is None else scale
    q, k, v = _fitting(query, key, value, head_dims)
    out: torch.Tensor = module.attention(q, k, v, scale=scale, **options).transpose(1, 2)
    return (out if v_width == head_dims[1] else out[..., :v_width]).contiguous()


def decode(
    mask: DescribedMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of a few queries to a cache, by the cache kernels, which have no gradients.

    Layers that share a mask share the module and its arguments: Python takes longer than kernels.

    Args:
        mask: what queries see; its lengths are on the device.
        query: as of `attend`, like what follows.
        key: its keys behind the mask's length are not written yet.
        value: likewise.
        scale: as of `attend`.
        softcap: as of `attend`.
        sinks: as of `attend`.

    Returns:
        As of `attend`.
    """
    _check_size(mask, query, key)
    width, v_width = query.shape[-1], value.shape[-1]
    device, traced = query.device, torch.compiler.is_compiling()
    like = (width, v_width, query.dtype, softcap, sinks is not None, device)
    ready = None if traced else mask.ready.get(like)
    if ready is None:
        head_dims = (supported_head_dim(width), supported_head_dim(v_width))
        module = module_of(
            mask=mask.kind,
            head_dims=head_dims,
            dtype=dtype_name(query.dtype),
            softcap=softcap,
            bias=None,
            sinks=sinks is not None,
            dropout=False,
            device=device,
        )
        ready = module.cache_attention, mask.options(), head_dims
        # How torch reads float32 may change between two layers.
        if not traced and query.dtype != torch.float32:
            mask.ready[like] = ready
    cache_attention, options, head_dims = ready
    q, k, v = _fitting(query, key, value, head_dims)
    if sinks is not None:
        options = {**options, "sinks": sinks.reshape(-1) if sinks.dim() != 1 else sinks}
    if traced:  # an operator that writes to its arguments takes none that require gradients
        q, k, v = (x.detach() for x in (q, k, v))
        options = {name: _detached(x) for name, x in options.items()}
    out: torch.Tensor = cache_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask.kv_lens,
        scale=width**-0.5 if scale is None else scale,
        **options,
    )
    return out if v_width == head_dims[1] else out[..., :v_width].contiguous()


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


def _fitting(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_dims: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What kernels for these head dimensions read: rows, with zeros behind shorter ones."""
    q, k, v = _rows(query), _rows(key), _rows(value)
    if q.shape[-1] != head_dims[0]:
        q, k = padded(q, head_dims[0]), padded(k, head_dims[0])
    return q, k, v if v.shape[-1] == head_dims[1] else padded(v, head_dims[1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
