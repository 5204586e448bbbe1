"""BlockLists: lists of the blocks of keys that queries have chosen, of which calls make a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.params import Tensor
from flashgen.symbols import GROUP, KV_HEADS, Q_HEADS, FloorDiv
from flashgen.tracing.expr import Expr, concrete, is_bound, kv_len, merged_params

if TYPE_CHECKING:
    import torch


class BlockLists(Tensor):
    """Lists that a call passes, by the table that kernels read: which list has which block.

    As a tensor it is that table, bool (..., lists, blocks of keys). The call passes `index`, and
    `counts` if there are any.

    Attributes:
        index: int32 (..., lists, entries): the blocks of each list, in any order.
        counts: int32 (..., lists): how many entries of a list count; None: all.
        block: keys of a block.
        query_block: queries of a list.
    """

    __slots__ = ("block", "counts", "index", "query_block")

    def __init__(self, index: Tensor, counts: Tensor | None, block: int, query_block: int) -> None:
        blocks = (kv_len + (block - 1)) // block
        super().__init__(index.name, (*index.dims[:-1], blocks), "bool", doc=index.doc)
        self.index, self.counts, self.block, self.query_block = index, counts, block, query_block

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        counts = None if self.counts is None else self.counts.declaration
        return ("BlockLists", self.index.declaration, counts, self.block, self.query_block)

    def shows(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Whether the list of a query has the block of a key."""
        leading = self.names[:-2]
        at = {"batch": b, Q_HEADS.name: h, "1": 0}
        if KV_HEADS.name in leading:
            at[KV_HEADS.name] = self._head_of_keys(h, leading.index(KV_HEADS.name))
        lead = (at[name] for name in leading)
        return self[(*lead, q_idx // self.query_block, kv_idx // self.block)]

    def _head_of_keys(self, h: Any, dim: int) -> Any:
        """The head of keys that a head of q reads; `index` has as many along ``dim``."""
        if is_bound():
            return h // (concrete(Expr(Q_HEADS)) // concrete(Expr(self.sym)).shape[dim])
        return Expr(FloorDiv(h.sym, GROUP))

    def _element(self, indices: tuple[Any, ...]) -> Any:
        if is_bound():
            index = concrete(Expr(self.sym))
            counts = None if self.counts is None else concrete(Expr(self.counts.sym))
            table = table_of_lists(index, counts, concrete(self.dims[-1]))
            return table[tuple(map(concrete, indices))]
        element: Expr = super()._element(indices)
        if self.counts is None:
            return element
        return Expr(element.sym, merged_params([element, Expr(self.counts.sym, (self.counts,))]))


def table_of_lists(index: torch.Tensor, counts: torch.Tensor | None, blocks: int) -> torch.Tensor:
    """Bool (..., lists, blocks): whether a list has a block, compared entry by entry.

    Args:
        index: int32 (..., lists, entries).
        counts: int32 (..., lists): how many entries of a list count; None: all.
        blocks: how many there are; entries of others count for nothing.
    """
    import torch

    found = index.unsqueeze(-1) == torch.arange(blocks, device=index.device)
    if counts is not None:
        place = torch.arange(index.shape[-1], device=index.device)
        found &= (place < counts.unsqueeze(-1)).unsqueeze(-1)
    return found.any(-2)
