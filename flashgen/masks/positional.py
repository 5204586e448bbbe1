"""Masks of positions alone."""

from __future__ import annotations

from typing import Any

from flashgen.errors import MaskError
from flashgen.expr import Expr, kv_len, q_len
from flashgen.masks.mask import Mask

ALIGNMENTS = (None, "top_left", "bottom_right")


def full() -> Mask:
    """Every query sees every key."""
    return Mask(lambda b, h, q_idx, kv_idx: True, "full()")


def causal(*, align: str | None = None) -> Mask:
    """A query sees its own position and those before it.

    Args:
        align: where the diagonal runs when q_len and kv_len differ. ``"top_left"``: query 0 sees
            key 0. ``"bottom_right"``: the last query sees the last key. None: the lengths must be
            equal, and the generated ``attention`` raises ValueError when they are not.
    """
    shift, argument = _shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + shift >= kv_idx

    return Mask(mask_mod, f"causal({argument})", equal_lengths=align is None)


def sliding_window(left: int | Expr, right: int | Expr, *, align: str | None = None) -> Mask:
    """A query at position q sees the keys from q - left to q + right, both included.

    Args:
        left: keys visible before the query's own position: a number, or an `Int` that the call
            chooses.
        right: keys visible after it.
        align: which key is at the query's own position when q_len and kv_len differ; see `causal`.
    """
    for name, width in (("left", left), ("right", right)):
        if isinstance(width, bool) or not isinstance(width, int | Expr):
            raise MaskError(f"sliding_window: {name}={width!r}; give a whole number or an Int")
    shift, argument = _shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= q_idx + shift - left) & (kv_idx <= q_idx + shift + right)

    arguments = ", ".join(filter(None, (str(left), str(right), argument)))
    return Mask(mask_mod, f"sliding_window({arguments})", equal_lengths=align is None)


def _shift(align: str | None) -> tuple[Any, str]:
    """The key position of query 0, and the argument as a label shows it."""
    if align not in ALIGNMENTS:
        raise MaskError(f"align={align!r}: unknown; choose None, 'top_left' or 'bottom_right'")
    shift = kv_len - q_len if align == "bottom_right" else 0
    return shift, "" if align is None else f"align={align!r}"
