"""What the table of a BlockMask says beside its mask function, which need not be nothing.

torch computes the pairs of the blocks that a row of blocks lists: all pairs of a full block, and of
the others those that the mask function shows. ``create_block_mask`` makes a table that follows from
the function; ``BlockMask.from_kv_blocks`` takes any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flashgen.masks import Mask, as_mask
from flashgen.params import Tensor
from flashgen.symbols import B, H

#: The names of the tables as arguments of a module.
LISTED, FULL = "listed_blocks", "full_blocks"

#: Pairs that are compared at once.
_PAIRS = 2**24


@dataclass(frozen=True)
class BlockTables:
    """The tables that have to be joined to a mask function; none if it says the same.

    Attributes:
        listed: bool (batch or 1, heads or 1, rows, columns): the blocks that are computed; None
            where the mask function hides all others.
        full: those of them that are not masked; None where the mask function shows all of them.
        block: the sizes of a block.
    """

    listed: torch.Tensor | None
    full: torch.Tensor | None
    block: tuple[int, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a trace depends on."""
        sizes = [None if x is None else (x.shape[0] > 1, x.shape[1] > 1) for x in self.tensors]
        return (*sizes, self.block if any(sizes) else None)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both tables."""
        return self.listed, self.full

    def joined(self, mask: Mask | None) -> Mask | None:
        """The mask with the tables."""
        if self.full is not None:
            table = _table_mask(FULL, self.full, self.block)
            mask = table if mask is None else table | mask
        if self.listed is not None:
            table = _table_mask(LISTED, self.listed, self.block)
            mask = table if mask is None else table & mask
        return mask

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """The tables as arguments of a module."""
        named = {LISTED: self.listed, FULL: self.full}
        return {name: x for name, x in named.items() if x is not None}


def _table_mask(name: str, table: torch.Tensor, block: tuple[int, int]) -> Mask:
    rows, columns = block
    dims = tuple(
        of if size > 1 else 1
        for of, size in zip(("batch", "num_q_heads"), table.shape, strict=False)
    )
    declared = Tensor(name, (*dims, None, None), "bool")

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        lead = (b if dims[0] != 1 else 0, h if dims[1] != 1 else 0)
        return declared[(*lead, q_idx // rows, kv_idx // columns)]

    return as_mask(listed)


class _Seen:
    """A tensor as it was when it was read.

    An id may be another tensor's later. torch does not count what is written to tensors of
    ``inference_mode``: their elements are compared.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._tensor = weakref.ref(x)
        self._version = None if x.is_inference() else x._version
        self._copy = x.clone() if x.is_inference() else None

    def still(self, x: torch.Tensor) -> bool:
        """Whether it is this tensor, which nobody has written to."""
        if self._tensor() is not x:
            return False
        if self._copy is None:
            return x._version == self._version
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # nothing may wait for the GPU, and a replay does not come here
        return torch.equal(x, self._copy)


@dataclass(frozen=True)
class _Compared:
    """The tables of a BlockMask, and what they were compared for.

    Attributes:
        key: equal for the same function and sizes, as long as ``kept`` is.
        seen: the tensors.
        kept: objects whose ids are in the key.
        tables: the tables.
    """

    key: tuple[Any, ...]
    seen: list[_Seen]
    kept: tuple[Any, ...]
    tables: BlockTables


#: By the id of a BlockMask: a reference to it, and its tables, once they were compared.
_compared: dict[int, tuple[weakref.ref[BlockMask], list[_Compared]]] = {}


def block_tables(
    mask: BlockMask,
    symbols: Callable[[], set[Any] | None],
    captured: tuple[Sequence[torch.Tensor], tuple[Any, ...], tuple[Any, ...]],
    shape: tuple[int, int],
) -> BlockTables:
    """The tables of a BlockMask, compared with its mask function once per object.

    Args:
        mask: it.
        symbols: tells which symbols its function depends on; None: it shows everything.
        captured: the tensors that the function captures, which may be written to, what else it
            depends on, and objects whose ids that has.
        shape: batch entries and heads of q.
    """
    known = _compared.get(id(mask))
    if known is None or known[0]() is not mask:
        at = id(mask)
        known = weakref.ref(mask, lambda _: _compared.pop(at, None)), []
        _compared[at] = known
    tensors, others, kept = captured
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    read = [*(x for x in lists if x is not None), *tensors]
    key = (id(mask.mask_mod), mask.seq_lengths, mask.BLOCK_SIZE, others, shape)
    for found in known[1]:
        same = found.key == key and len(found.seen) == len(read)
        if same and all(map(_Seen.still, found.seen, read)):
            return found.tables
    tables = _compare(mask, symbols(), shape)
    known[1][:] = [_Compared(key, list(map(_Seen, read)), (*kept, mask.mask_mod), tables)]
    return tables


def _compare(mask: BlockMask, symbols: set[Any] | None, shape: tuple[int, int]) -> BlockTables:
    partial = _dense(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    listed = partial | full
    rows, columns = mask.BLOCK_SIZE
    q_len, kv_len = mask.seq_lengths
    if symbols is None:
        return BlockTables(None if _all(listed, mask) else listed, None, (rows, columns))
    block = (rows, columns)
    rows, columns = max(1, min(rows, q_len)), max(1, min(columns, kv_len))
    batch, heads = (n if s in symbols else 1 for n, s in zip(shape, (B, H), strict=True))
    step = max(1, _PAIRS // max(1, batch * heads * kv_len * rows)) * rows
    adds = shows = False
    for first in range(0, q_len, step):
        count = min(step, q_len - first)
        seen = create_mask(
            _moved(mask.mask_mod, first), batch, heads, count, kv_len, mask.kv_num_blocks.device
        ).bool()
        some, every = _blocks(seen, rows, columns)
        at = slice(first // rows, first // rows + some.shape[2])
        adds |= bool((some & ~listed[:, :, at, : some.shape[3]]).any())
        shows |= bool((full[:, :, at, : some.shape[3]] & ~every).any())
    return BlockTables(listed if adds else None, full if shows else None, block)


def _moved(mask_mod: Any, first: int) -> Any:
    def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b, h, q_idx + first, kv_idx)

    return moved


def _all(listed: torch.Tensor, mask: BlockMask) -> bool:
    rows, columns = (
        -(-n // size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)
    )
    return bool(listed[:, :, :rows, :columns].all())


def _blocks(seen: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each block has a pair that is seen, and whether it has no other."""
    *lead, q_len, kv_len = seen.shape
    pad = (0, -kv_len % columns, 0, -q_len % rows)
    found = []
    for value, reduce in ((False, torch.Tensor.any), (True, torch.Tensor.all)):
        padded = torch.nn.functional.pad(seen, pad, value=value)
        split = padded.view(*lead, padded.shape[-2] // rows, rows, -1, columns)
        found.append(reduce(reduce(split, -1), -2))
    return found[0], found[1]


def _dense(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Bools for lists of columns: bool (batch, heads, rows, columns)."""
    if counts.dim() != 3:
        raise ValueError(
            f"block_mask: its tables have {counts.dim()} dimensions; pass one of 3, by batch and "
            "head, as from block_mask[:, :]"
        )
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    table = indices.new_zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool)
    at = torch.where(listed, indices, columns).long()
    return table.scatter_(-1, at, True)[..., :columns].contiguous()
