"""Padding as bounds: the keys of each sequence from the first to the last that is none."""

from __future__ import annotations

import torch

from flashgen.integrations.layers.described import TensorKind
from flashgen.integrations.layers.recorded import TRUE, Node

_RANGE = (
    TensorKind("keys_from", ("batch",), "int32"),
    TensorKind("keys_to", ("batch",), "int32"),
)
_PADDING = (
    TensorKind("solid_to", ("batch",), "int32"),
    TensorKind("padding", ("batch", "kv_len"), "bool"),
)

#: Up to so many elements of an attention mask are looked at by the host, which waits once for them:
#: that takes less time than the launches of a dozen small kernels.
HOST_LOOKS = 2**17


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

    Returns:
        It, and tensors of allowed's device; nothing is hidden by ``TRUE``.
    """
    seen = allowed[:, :valid]
    look = look and waits()
    here = look and seen.numel() <= HOST_LOOKS
    if here:
        seen = seen.cpu()
    if look and bool(seen.all()):
        return TRUE, [], []
    # A number in torch.where is a launch of its own: here the ends of a range are at hand.
    reach = torch.arange(-1, valid + 1, device=seen.device, dtype=torch.int32)
    before, index, behind = reach[:1], reach[1:-1], reach[-1:]
    first = torch.where(seen, index, behind).amin(-1)
    end = torch.where(seen, index, before).amax(-1) + 1
    solid = torch.where(seen | (index < first[:, None]), behind, index).amin(-1)
    has_holes = not look or bool((solid < end).any())
    if here:
        # Each of them at 16 bytes, as other tensors are: kernels are compiled for that.
        rows = torch.nn.functional.pad(torch.stack([first, end, solid]), (0, -len(seen) % 4))
        first, end, solid = rows.to(allowed.device)[:, : len(seen)]
    if has_holes:
        return ("padding",), [*_RANGE, *_PADDING], [first, end, solid, allowed]
    return ("range",), [*_RANGE], [first, end]
