"""diffusers' models on flashgen's kernels: ``model.set_attention_backend("fgen")``.

diffusers keeps its attention backends in a registry that is private, under names that are members
of an enumeration. `register` adds one to both, in the versions whose registry is known.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from flashgen.integrations.call_tensors import autocast
from flashgen.integrations.layers.calls import (
    Seen,
    attend,
    everything,
    from_the_first_key,
    of_elements,
)

__all__ = ["NAME", "VERSIONS", "attention", "register", "unregister"]

#: The name of the backend.
NAME = "fgen"

#: The releases whose registry is known.
VERSIONS = ("0.41", "0.42")

_registry: Any = attention_dispatch._AttentionBackendRegistry


class _AnyName(frozenset[str]):
    """The names of the arguments that a backend takes: all, so that it can refuse the unknown."""

    def __contains__(self, name: object) -> bool:
        return True


def register() -> str:
    """Adds flashgen's attention to diffusers' backends; again, it changes nothing.

    Returns:
        The name for ``model.set_attention_backend`` and ``attention_backend``.

    Raises:
        RuntimeError: this release of diffusers was not tested.
    """
    release = ".".join(diffusers.__version__.split(".")[:2])
    if release not in VERSIONS:
        raise RuntimeError(
            f"diffusers {diffusers.__version__}: flashgen knows the private registry of "
            f"{' and '.join(VERSIONS)}; install one of these"
        )
    if NAME not in AttentionBackendName.__members__:
        member = str.__new__(AttentionBackendName, NAME)
        member._name_, member._value_ = NAME, NAME
        AttentionBackendName._member_map_[NAME] = member
        AttentionBackendName._value2member_map_[NAME] = member
        AttentionBackendName._member_names_.append(NAME)
    backend = AttentionBackendName(NAME)
    _registry.register(backend)(attention)
    _registry._supported_arg_names[backend] = _AnyName()
    return NAME


def unregister() -> None:
    """Takes it out of them again: models that have it raise at their next call."""
    if NAME not in AttentionBackendName.__members__:
        return
    backend = AttentionBackendName(NAME)
    if _registry._active_backend == backend:
        _registry.set_active_backend(AttentionBackendName.NATIVE)
    for held in (_registry._backends, _registry._constraints, _registry._supported_arg_names):
        held.pop(backend, None)
    del AttentionBackendName._member_map_[NAME], AttentionBackendName._value2member_map_[NAME]
    AttentionBackendName._member_names_.remove(NAME)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> torch.Tensor:
    """Attention as diffusers dispatches it.

    Args:
        query: (batch, q_len, num_q_heads, qk_head_dim).
        key: (batch, kv_len, num_kv_heads, qk_head_dim).
        value: (batch, kv_len, num_kv_heads, v_head_dim).
        attn_mask: bools (True: is seen) or floats, which are added to the scores: (batch, kv_len),
            (q_len, kv_len), or four dimensions that expand to (batch, num_q_heads, q_len, kv_len).
            Bools that say the same for all queries become bounds.
        dropout_p: the probability that a weight is dropped.
        is_causal: whether query i sees the keys up to key i alone.
        scale: factor on ``query @ key.T``; None is ``qk_head_dim ** -0.5``.
        enable_gqa: whether num_q_heads may be a multiple of num_kv_heads.
        return_lse: refused.
        others: refused if they are not None.

    Returns:
        (batch, q_len, num_q_heads, v_head_dim).

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is accepted.
    """
    given = {"return_lse": return_lse or None, "_parallel_config": _parallel_config, **others}
    for name, value_given in given.items():
        if value_given is not None:
            raise ValueError(f"{name}: flashgen's backend has it not; leave it out")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(
            f"key: got {key.shape[2]} heads for {query.shape[2]} of query; pass enable_gqa=True if "
            "groups of heads share keys"
        )
    query, key, value = (x.transpose(1, 2) for x in autocast(query, key, value))
    if attn_mask is not None:
        if is_causal:
            raise ValueError("is_causal: is given beside attn_mask; pass one of them")
        seen = _seen(attn_mask, query, key)
    else:
        seen = from_the_first_key(query, key) if is_causal else everything()
    return attend(query, key, value, seen, scale=scale, dropout=dropout_p)


def _seen(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Seen:
    """What a mask shows."""
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        if mask.shape == (batch, kv_len):
            mask = mask[:, None, None]
        elif mask.shape == (q_len, kv_len):
            mask = mask[None, None]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[-1] not in (1, kv_len):
        given = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attn_mask: got {given}; pass ({batch}, {kv_len}), ({q_len}, {kv_len}), or four "
            "dimensions"
        )
    return of_elements(mask, query, key)
