"""Padding as bounds: the keys of each sequence from the first to the last that is none."""

from __future__ import annotations

import torch

from flashgen.integrations.layers.described import TensorKind
from flashgen.integrations.layers.recorded import TRUE, Node, parts_of

_RANGE = (
    TensorKind("keys_from", ("batch",), "int32"),
    TensorKind("keys_to", ("batch",), "int32"),
)
_PADDING = (
    TensorKind("solid_to", ("batch",), "int32"),
    TensorKind("padding", ("batch", "kv_len"), "bool"),
)


def waits() -> bool:
    """Whether the host may wait for the device."""
    if torch.compiler.is_compiling():
        return False
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not (started and torch.cuda.is_current_stream_capturing())


def padding(
    allowed: torch.Tensor, valid: int, *, look: bool
) -> tuple[Node, list[TensorKind], list[torch.Tensor]]:
    """The condition that a key is no padding, and its tensors.

    Args:
        allowed: bool (batch, kv_len).
        valid: how many keys are looked at.
        look: whether the host may wait to see which of them are padding.
    """
    seen = allowed[:, :valid]
    index = torch.arange(valid, device=seen.device)
    first = torch.where(seen, index, valid).amin(-1)
    end = torch.where(seen, index + 1, 0).amax(-1)
    holes = ~seen & (index >= first[:, None])
    solid = torch.where(holes, index, valid).amin(-1)
    has_holes = True
    if look and waits():
        whole, has_holes = torch.stack(
            [((end - first == valid) & (solid == valid)).all(), (solid < end).any()]
        ).tolist()
        if whole:
            return TRUE, [], []
    if has_holes:
        return ("padding",), [*_RANGE, *_PADDING], [first.int(), end.int(), solid.int(), allowed]
    return ("range",), [*_RANGE], [first.int(), end.int()]


def joined(node: Node, other: Node) -> Node:
    """Both conditions."""
    kept = [part for part in (*parts_of(node), *parts_of(other)) if part != TRUE]
    return ("and", *kept) if len(kept) > 1 else kept[0] if kept else TRUE
