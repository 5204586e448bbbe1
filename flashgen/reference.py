"""attention_reference: the eager oracle that every kernel is held to.

It shares nothing with the generated kernels: the user's own mask function runs on index tensors,
not the traced predicate, and the arithmetic is float64 unless float32 is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashgen.expr import bound, concrete
from flashgen.masks import Mask, MaskMod, as_mask

if TYPE_CHECKING:
    import torch


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | MaskMod,
    *,
    scale: float | None = None,
    params: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * q @ k.T, where visible) @ v``, in full precision.

    Args:
        q: (batch, num_q_heads, q_len, qk_head_dim).
        k: (batch, num_kv_heads, kv_len, qk_head_dim). num_kv_heads divides num_q_heads; query head
            i attends to key head ``i // (num_q_heads // num_kv_heads)``.
        v: (batch, num_kv_heads, kv_len, v_head_dim).
        mask: which keys a query sees.
        scale: None is ``qk_head_dim ** -0.5``.
        params: values of the mask's `Int` parameters by name; missing ones take their default.
        dtype: what to compute in and to return; None is float64.
        return_lse: also return the log of the sum of exponentials of a row's scores.

    Returns:
        (batch, num_q_heads, q_len, v_head_dim); with ``return_lse`` also
        (batch, num_q_heads, q_len), in natural log. A row that sees no key is 0, its LSE -inf.

    Raises:
        ValueError: a parameter has no value, or the mask demands equal lengths and they differ.
    """
    import torch

    dtype = dtype or torch.float64
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    batch, heads, q_len, _ = q.shape
    visible = visibility(mask, batch, heads, q_len, k.shape[2], params=params, device=q.device)

    scores = (q.to(dtype) @ keys.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing has -inf throughout: subtracting 0 instead of its LSE gives weights 0.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = weights @ values
    return (out, lse) if return_lse else out


def visibility(
    mask: Mask | MaskMod,
    batch: int,
    num_q_heads: int,
    q_len: int,
    kv_len: int,
    *,
    params: Mapping[str, int] | None = None,
    device: Any = None,
) -> torch.Tensor:
    """The mask as a boolean tensor that broadcasts to (batch, num_q_heads, q_len, kv_len).

    Raises:
        ValueError: a parameter has no value, or the mask demands equal lengths and they differ.
    """
    import torch

    mask = as_mask(mask)
    if mask.equal_lengths and q_len != kv_len:
        raise ValueError(f"{mask.label} needs q_len == kv_len, got {q_len} and {kv_len}")
    values = {param.name: param.default for param in mask.params} | dict(params or {})
    given = {name: value for name, value in values.items() if value is not None}
    if missing := sorted(values.keys() - given.keys()):
        raise ValueError(f"{mask.label} needs a value for {', '.join(missing)}")
    b, h, q_idx, kv_idx = (
        torch.arange(size, device=device).reshape(shape)
        for size, shape in (
            (batch, (-1, 1, 1, 1)),
            (num_q_heads, (-1, 1, 1)),
            (q_len, (-1, 1)),
            (kv_len, (-1,)),
        )
    )
    with bound({**given, "q_len": q_len, "kv_len": kv_len}):
        seen = concrete(mask.mask_mod(b, h, q_idx, kv_idx))
    visible: torch.Tensor = seen | torch.zeros((q_len, kv_len), dtype=torch.bool, device=device)
    return visible
