"""The attention function of the registry."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.integrations.call_tensors import autocast
from flashgen.integrations.layers.calls import (
    attend,
    decode,
    everything,
    from_the_first_key,
    of_description,
    of_elements,
)
from flashgen.integrations.layers.described import DescribedMask

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
        if sliding_window is not None and sliding_window < key.shape[2]:
            raise ValueError(
                f"sliding_window: got {sliding_window} for {key.shape[2]} keys, and no mask that "
                "has it"
            )
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        # As sdpa has it. Keys behind the last query, of an empty static cache, are not written yet.
        one = query.shape[2] == 1
        seen = from_the_first_key(query, key) if causal and not one else everything()
    elif isinstance(attention_mask, DescribedMask):
        if attention_mask.kv_lens is not None and position_bias is None and dropout == 0:
            given = (query, key, value) if s_aux is None else (query, key, value, s_aux)
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
                out = decode(
                    attention_mask, query, key, value, scale=scaling, softcap=softcap, sinks=s_aux
                )
                return out, None
        seen = of_description(attention_mask, query, key)
    else:
        seen = of_elements(attention_mask, query, key)
    out = attend(
        query,
        key,
        value,
        seen,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        bias=position_bias,
    )
    return out, None


def _check_others(given: dict[str, Any], mask: Any) -> None:
    """Raises for an argument that may change the result and that is not known here."""
    for name, value in given.items():
        if value is None or name in HARMLESS or (name in _PACKED and _is_packed(given, mask)):
            continue
        if name in _PACKED:
            raise ValueError(
                f"{name}: packed sequences are read from position_ids, without attention_mask and "
                "without a cache; the mask of this call has none"
            )
        raise ValueError(f"{name}: flashgen does not know what attention does with it; pass None")


def _is_packed(given: dict[str, Any], mask: Any) -> bool:
    """Whether a mask has the packed sequences of which lengths are given, or there is but one."""
    if isinstance(mask, DescribedMask) and any(x.in_order for x in mask.kind.tensors):
        return True
    lengths = [given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    return all(isinstance(x, torch.Tensor) and x.numel() == 2 for x in lengths)
