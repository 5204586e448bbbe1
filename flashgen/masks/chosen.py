"""chosen_blocks: the blocks of keys that each query, or block of queries, has chosen."""

from __future__ import annotations

from typing import Any

from flashgen.arguments import declared, label
from flashgen.block_lists import BlockLists
from flashgen.errors import MaskError
from flashgen.masks.mask import Mask
from flashgen.params import Tensor
from flashgen.tracing.expr import Expr, q_len

_LEADING = (("batch", "1"), ("num_kv_heads", "num_q_heads", "1"))


def chosen_blocks(
    index: Tensor | None = None,
    counts: Tensor | None = None,
    block: int = 64,
    query_block: int = 64,
) -> Mask:
    """A query sees the keys of the blocks in its list, which the call passes.

    Each query has a list, as in Native Sparse Attention (Yuan et al. 2025,
    https://arxiv.org/abs/2502.11089) and MoBA (Lu et al. 2025, https://arxiv.org/abs/2502.13189),
    or each block of queries, as in VSA (Zhang et al. 2025, https://arxiv.org/abs/2505.13389).
    ``chosen_blocks(query_block=1) & causal()`` hides the keys of a chosen block that come after the
    query. A list is a set: the order of its entries and how often one is there do not matter. -1
    and all else that is no block of the call's keys shows nothing.

    Gradients are of q, k and v: the lists get none.

    Args:
        index: the lists, int32 of four dimensions: ``"batch"`` or 1; ``"num_kv_heads"`` (heads of q
            that share keys share lists), ``"num_q_heads"`` or 1; ``ceil(q_len / query_block)``, the
            lists; None, the entries of a list. None declares
            ``Tensor("chosen", ("batch", "num_kv_heads", (q_len + 63) // 64, None), "int32")``.
        counts: int32 of the first three of these dimensions: how many entries of a list count, from
            its begin. None: all do.
        block: keys of a block: 16, 32, or a multiple of 64.
        query_block: queries of a list: 1, or a multiple of 64.

    Raises:
        MaskError: one of these is something else.
    """
    for name, size, small in (("block", block, (16, 32)), ("query_block", query_block, (1,))):
        is_number = isinstance(size, int) and not isinstance(size, bool)
        if not (is_number and (size in small or (size > 0 and size % 64 == 0))):
            known = ", ".join(map(str, small))
            raise MaskError(f"chosen_blocks: {name}={size!r}; give {known} or a multiple of 64")
    rows = (q_len + (query_block - 1)) // query_block
    if index is None:
        doc = f"The blocks of {block} keys that queries see; -1 is none."
        dims = ("batch", "num_kv_heads", rows, None)
        index = Tensor("chosen", dims, "int32", doc=doc)
    example = f"Tensor('chosen', ('batch', 'num_kv_heads', {rows}, None), 'int32')"
    index = declared("chosen_blocks", "index", index, example)
    _check("index", index, rows, (None,), example)
    if counts is not None:
        example = f"Tensor('counts', ({', '.join(map(_quoted, index.names[:-1]))}), 'int32')"
        counts = declared("chosen_blocks", "counts", counts, example)
        _check("counts", counts, rows, (), example)
        if counts.names != index.names[:-1]:
            raise MaskError(
                f"chosen_blocks: counts={counts!r} beside index={index!r}; give it the same "
                f"dimensions but the last: {example}"
            )
    lists = BlockLists(index, counts, block, query_block)
    numbers = (f"block={block}", f"query_block={query_block}")
    given = (index if index.name != "chosen" else None, counts)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return lists.shows(b, h, q_idx, kv_idx)

    return Mask(mask_mod, label("chosen_blocks", *given, *numbers), moves=False)


def _check(name: str, tensor: Tensor, rows: Expr, rest: tuple[None, ...], example: str) -> None:
    """Raises MaskError for lists of another shape or dtype."""
    names = tensor.names
    is_right = (
        type(tensor) is Tensor
        and tensor.dtype == "int32"
        and len(names) == 3 + len(rest)
        and all(known in of for known, of in zip(names, _LEADING, strict=False))
        and tensor.dims[2] is not None
        and tensor.dims[2].sym == rows.sym
        and tensor.dims[3:] == rest
    )
    if not is_right:
        raise MaskError(f"chosen_blocks: {name}={tensor!r}; declare it as {example}")


def _quoted(name: str) -> str:
    return repr(name) if name.isidentifier() else name
