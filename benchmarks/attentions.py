"""The measured attentions in plain torch: functions for FlexAttention and for float64.

Each attention also has the arguments of flashgen's module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: ``(b, h, q_idx, kv_idx) -> bool``, on numbers or tensors that broadcast.
MaskMod = Callable[[Any, Any, Any, Any], Any]
#: ``(score, b, h, q_idx, kv_idx) -> score``, on numbers or tensors that broadcast.
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]

WINDOW = 1024  # keys before its own that a query of a window sees
DOCUMENT = 1000  # tokens of a packed document
CAP = 30.0  # of the capped scores
PREFIX = 4096  # keys that every query sees
CHUNK = 2048  # positions of a chunk
SINKS = 4  # first keys that every query sees beside its window
DROPOUT_P = 0.1  # by which weights are dropped
HEADS = 16  # that slopes are learned for
SEED = 1  # of flashgen's dropout, which accuracy is looked at by
ROWS = 1024  # queries looked at together where a whole score matrix would be too large


@dataclass(frozen=True)
class Attention:
    """One attention, for sequences of one length on one device.

    Attributes:
        mask_mod: which keys a query sees; None if it sees all.
        score_mod: the score function of ``scale * q @ k.T``; None for none.
        parameters: keywords of the module's ``attention``.
        learned: the parameters with a gradient; `score_mod` reads the same tensors.
        dropout_p: the probability that a weight is dropped; each peer drops other weights.
    """

    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    dropout_p: float = 0.0


def causal_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def full(length: int, device: torch.device) -> Attention:
    """Every query sees every key."""
    return Attention()


def causal(length: int, device: torch.device) -> Attention:
    """A query sees its own position and those before it."""
    return Attention(causal_mask)


def dropout(length: int, device: torch.device) -> Attention:
    """Causal, weights dropped with probability `DROPOUT_P`."""
    seed = torch.tensor([SEED], device=device)
    parameters = {"dropout_p": DROPOUT_P, "seed": seed}
    return Attention(causal_mask, parameters=parameters, dropout_p=DROPOUT_P)


def window(length: int, device: torch.device) -> Attention:
    """Causal, `WINDOW` keys back."""
    width = WINDOW

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    return Attention(mask_mod, parameters={"left": width})


def documents(length: int, device: torch.device) -> Attention:
    """Causal within each of the documents of `DOCUMENT` tokens that are packed into a sequence."""
    ids = torch.arange(length, device=device, dtype=torch.int32) // DOCUMENT

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return Attention(mask_mod, parameters={"document_ids": ids[None]})


def softcap(length: int, device: torch.device) -> Attention:
    """Causal, scores squashed into (-CAP, CAP)."""
    cap = CAP

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return Attention(causal_mask, score_mod, {"cap": cap})


def alibi(length: int, device: torch.device) -> Attention:
    """Causal, a bias that falls with the distance, at each of 16 heads at another rate."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.exp2((h + 1) * -0.5) * (kv_idx - q_idx)

    return Attention(causal_mask, score_mod)


def alibi_slopes(length: int, device: torch.device) -> Attention:
    """`alibi` with the rates in a learned tensor."""
    slopes = torch.exp2(-0.5 * torch.arange(1, HEADS + 1, device=device)).requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return Attention(causal_mask, score_mod, {"slopes": slopes}, ("slopes",))


def prefix(length: int, device: torch.device) -> Attention:
    """Causal, and the first `PREFIX` keys visible to every query."""
    end = PREFIX

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < end) | (q_idx >= kv_idx)

    return Attention(mask_mod, parameters={"prefix": end})


def chunked(length: int, device: torch.device) -> Attention:
    """Causal within chunks of `CHUNK` positions."""
    size = CHUNK

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // size == kv_idx // size) & (q_idx >= kv_idx)

    return Attention(mask_mod, parameters={"chunk": size})


def sink_window(length: int, device: torch.device) -> Attention:
    """Causal, `WINDOW` keys back and the first `SINKS` keys of the sequence."""
    width, sinks = WINDOW, SINKS

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= width) | (kv_idx < sinks))

    return Attention(mask_mod, parameters={"sinks": sinks, "left": width})


#: The attentions by name; a function reads the constants above when it is called.
ATTENTIONS: dict[str, Callable[[int, torch.device], Attention]] = {
    "full": full,
    "causal": causal,
    "dropout": dropout,
    "window": window,
    "documents": documents,
    "softcap": softcap,
    "alibi": alibi,
    "alibi_slopes": alibi_slopes,
    "prefix": prefix,
    "chunked": chunked,
    "sink_window": sink_window,
}


def visible_pairs(attention: Attention, length: int, device: torch.device) -> int:
    """How many (query, key) pairs of one head of one sequence the mask shows, counted."""
    if attention.mask_mod is None:
        return length * length
    kv_idx = torch.arange(length, device=device, dtype=torch.int32)
    rows = torch.split(kv_idx[:, None], ROWS)
    return sum(int(attention.mask_mod(0, 0, q_idx, kv_idx).sum()) for q_idx in rows)
