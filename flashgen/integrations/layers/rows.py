"""The elements of a mask as bounds: the keys of each query from the first to the last it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen.integrations.layers.described import TensorKind
from flashgen.integrations.layers.padding import waits
from flashgen.integrations.layers.recorded import TRUE, Node

#: The condition of a mask, its tensors' kinds, and these.
Rows = tuple[Node, list[TensorKind], list[torch.Tensor]]

#: Up to so many queries, kernels that find bounds take longer than the attention.
FEW = 16

#: What was found of a tensor, and its version then; layers of a model share a mask.
_known: Any = WeakTensorKeyDictionary()


def rows(seen: torch.Tensor) -> Rows | None:
    """The condition that a query sees a key, by bounds of each query's keys.

    If each query sees all keys between its first and its last, no element is read by kernels. Else
    they read those from the first key in between on that the query does not see.

    Args:
        seen: bool (1 or batch, 1 or num_q_heads, q_len, kv_len).

    Returns:
        It; None where the host may not wait, or queries are few.
    """
    if seen.shape[2] <= FEW or seen.numel() == 0 or not waits():
        return None
    batch, heads, _, kv_len = seen.shape
    dims = (1 if batch == 1 else "batch", 1 if heads == 1 else "num_q_heads", "q_len")
    bits = seen.view(torch.uint8)
    count = seen.sum(-1, dtype=torch.int32)
    first = bits.argmax(-1)
    end = kv_len - bits.flip(-1).argmax(-1)
    has_holes, hides = torch.stack(
        [((count != end - first) & (count > 0)).any(), (count < kv_len).any()]
    ).tolist()
    if not hides:
        return TRUE, [], []
    none = count == 0  # a row without a key narrows nothing
    tables = [first.masked_fill(none, kv_len).int(), end.masked_fill(none, 0).int()]
    kinds = [TensorKind(name, dims, "int32") for name in ("keys_from", "keys_to")]
    if not has_holes:
        return ("row_range",), kinds, tables
    index = torch.arange(kv_len, device=seen.device, dtype=torch.int32)
    between = ~seen & (index >= tables[0][..., None])
    missing = between.view(torch.uint8).argmax(-1)
    solid = torch.where(between.any(-1), missing, kv_len).int()
    kinds += [
        TensorKind("solid_to", dims, "int32"),
        TensorKind("elements", (*dims, "kv_len"), "bool"),
    ]
    return ("row_elements",), kinds, [*tables, solid, seen]


def rows_once(seen: torch.Tensor) -> Rows | None:
    """`rows` of a tensor that several layers get; None of one whose writes are not counted."""
    if not waits() or seen.is_inference():
        return None
    known = _known.get(seen)
    if known is None or known[0] != seen._version:
        known = _known[seen] = seen._version, rows(seen)
    found: Rows | None = known[1]
    return found
