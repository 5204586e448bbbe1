"""Masks that show runs of keys: before a query, around it, at the front, in its chunk."""

from __future__ import annotations

from typing import Any

from flashgen.arguments import divisor, label, shift, whole
from flashgen.errors import MaskError
from flashgen.masks.mask import Mask
from flashgen.params import Int, Tensor
from flashgen.tracing.expr import Expr


def full() -> Mask:
    """Every query sees every key."""
    return Mask(lambda b, h, q_idx, kv_idx: True, "full()", moves=False)


def causal(*, align: str | None = None) -> Mask:
    """A query sees its own position and those before it.

    Args:
        align: where the diagonal runs when q_len and kv_len differ. ``"top_left"``: query 0 sees
            key 0. ``"bottom_right"``: the last query sees the last key. None: the lengths must be
            equal, and the generated ``attention`` raises ValueError when they are not.
    """
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + offset >= kv_idx

    return Mask(mask_mod, label("causal", align=align), equal_lengths=align is None, align=align)


def sliding_window(
    left: int | Expr | Tensor, right: int | Expr | Tensor, *, align: str | None = None
) -> Mask:
    """A query at position q sees the keys from q - left to q + right, both included.

    Args:
        left: keys visible before the query's own position: a number, an `Int` that the call
            chooses, or an int32 `Tensor` of dims ``("num_q_heads",)`` or ``("batch",)``, a width
            for each.
        right: keys visible after it: as ``left``.
        align: which key is at the query's own position when q_len and kv_len differ; see `causal`.

    There is no number for a side without a limit: combine `causal`, or its inverse, instead.

    Raises:
        MaskError: the numbers leave no key, as FlashAttention's -1 would.
    """
    before = whole("sliding_window", "left", left)
    after = whole("sliding_window", "right", right)
    if isinstance(left, int) and isinstance(right, int) and left + right < 0:
        raise MaskError(
            f"sliding_window: left={left}, right={right} leave no key; for a side without a limit, "
            "write causal(), or a function"
        )
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position = q_idx + offset
        return (kv_idx >= position - before(b, h)) & (kv_idx <= position + after(b, h))

    name = label("sliding_window", left, right, align=align)
    return Mask(mask_mod, name, equal_lengths=align is None, align=align)


def prefix_lm(prefix: int | Expr | Tensor, *, align: str | None = None) -> Mask:
    """A query sees the first ``prefix`` keys, its own position and those before it.

    The prefix sees itself in both directions; the rest is causal (Raffel et al. 2020,
    https://arxiv.org/abs/1910.10683, section 3.2.1).

    Args:
        prefix: a number, an `Int` that the call chooses, or an int32 `Tensor` of dims
            ``("batch",)``, a prefix for each sequence.
        align: which key is at a query's own position when q_len and kv_len differ; see `causal`.
    """
    keys = whole("prefix_lm", "prefix", prefix, least=0)
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < keys(b, h)) | (q_idx + offset >= kv_idx)

    return Mask(
        mask_mod, label("prefix_lm", prefix, align=align), equal_lengths=align is None, align=align
    )


def chunked(size: int | Int, *, align: str | None = None) -> Mask:
    """A query sees the keys of its own chunk: positions are cut into chunks of ``size``.

    ``chunked(8192) & causal()`` is the chunked attention of Llama 4; alone it is the block-local
    attention of encoders.

    Args:
        size: positions a chunk: a number, or an `Int` with min=1 that the call chooses.
        align: which key is at a query's own position when q_len and kv_len differ; see `causal`.
    """
    width = divisor("chunked", "size", size)
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + offset) // width == kv_idx // width

    return Mask(
        mask_mod, label("chunked", size, align=align), equal_lengths=align is None, align=align
    )


def sink_tokens(n: int | Expr | Tensor) -> Mask:
    """Every query sees the first ``n`` keys.

    StreamingLLM (Xiao et al. 2023, https://arxiv.org/abs/2309.17453) keeps them beside a window:
    ``causal() & (sink_tokens(4) | sliding_window(1023, 0))``. Mind the parentheses: ``&`` binds
    before ``|``, and without causal() the first queries see sinks that come after them.

    Args:
        n: a number, an `Int` that the call chooses, or an int32 `Tensor` of dims ``("batch",)`` or
            ``("num_q_heads",)``.
    """
    keys = whole("sink_tokens", "n", n, least=1)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < keys(b, h)

    return Mask(mask_mod, label("sink_tokens", n), moves=False)


def global_tokens(n: int | Expr | Tensor, *, align: str | None = None) -> Mask:
    """The first ``n`` positions see every key and are seen by every query.

    A part of Longformer (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150):
    ``global_tokens(16) | sliding_window(256, 256)``.

    Args:
        n: a number, an `Int` that the call chooses, or an int32 `Tensor` of dims ``("batch",)`` or
            ``("num_q_heads",)``.
        align: which key is at a query's own position when q_len and kv_len differ; see `causal`.
    """
    tokens = whole("global_tokens", "n", n, least=1)
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < tokens(b, h)) | (q_idx + offset < tokens(b, h))

    return Mask(
        mask_mod, label("global_tokens", n, align=align), equal_lengths=align is None, align=align
    )
