"""Masks that read a tensor: documents, trees and tables of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.arguments import check_dims, declared, divisor, entry, label, shift, whole
from flashgen.constants import Constant, elements_of
from flashgen.errors import MaskError
from flashgen.functions import maximum, minimum
from flashgen.masks.mask import Mask
from flashgen.params import Int, Tensor
from flashgen.tracing.expr import Expr, kv_len, q_len

if TYPE_CHECKING:
    import torch


def document(
    ids: Tensor | None = None, kv_ids: Tensor | None = None, *, align: str | None = None
) -> Mask:
    """A query sees the keys of its own document, where several are packed into one sequence.

    ``document() & causal()`` is causal within each document. Padding has the id -1, which is no
    document: such queries see no key, no query sees such keys, and their rows may hold anything.

    Args:
        ids: the document that each key position belongs to: int32 of dims ``("batch", "kv_len")``,
            or ``("kv_len",)`` for all sequences alike, declared with ``sorted=True`` so that loop
            bounds follow: ids in another order give right results, more slowly. None declares
            ``Tensor("document_ids", ("batch", "kv_len"), "int32", sorted=True)``.
        kv_ids: where queries and keys are packed each in their own way (cross attention): ``ids``
            is then of dims ``("batch", "q_len")``, this of ``("batch", "kv_len")``, and the lengths
            may differ.
        align: without ``kv_ids``, which key is at a query's own position when q_len and kv_len
            differ; see `causal`. A query outside the keys sees nothing.
    """
    if kv_ids is not None and ids is None:
        raise MaskError(f"document: kv_ids={kv_ids!r} without ids; give ids too, of the queries")
    keys = ids if kv_ids is None else kv_ids
    if keys is None:
        keys = Tensor(
            "document_ids",
            ("batch", "kv_len"),
            "int32",
            sorted=True,
            doc="The document of each position: never falling along a sequence.",
        )
    queries = keys if kv_ids is None or ids is None else ids
    length = "kv_len" if queries is keys else "q_len"
    for name, given, along in (("ids", queries, length), ("kv_ids", keys, "kv_len")):
        tensor = declared(
            "document", name, given, "Tensor('ids', ('batch', 'kv_len'), 'int32', sorted=True)"
        )
        if tensor.dtype != "int32":
            raise MaskError(f"document: {name}={tensor!r}; declare it with dtype='int32'")
        check_dims("document", name, tensor, ("batch", along))
    if queries is not keys and align is not None:
        raise MaskError(f"document: align={align!r} beside kv_ids, which needs none; leave it out")
    offset = shift(align)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position, inside = q_idx + offset, True
        if align == "top_left":
            position, inside = minimum(position, kv_len - 1), position < kv_len
        elif align == "bottom_right":
            position, inside = maximum(position, 0), position >= 0
        mine = entry(queries, batch=b, q_len=position, kv_len=position)
        theirs = entry(keys, batch=b, kv_len=kv_idx)
        return inside & (mine == theirs) & (theirs != -1)

    return Mask(
        mask_mod,
        label("document", ids, kv_ids, align=align),
        equal_lengths=align is None and queries is keys,
        align=align,
        moves=queries is keys,
        along=None if align or queries is not keys else lambda at: document(ids, align=at),
    )


def tree(ancestors: Tensor | None = None) -> Mask:
    """A drafted token sees the whole context, and of the other drafted tokens its ancestors.

    Speculative decoding verifies a tree of drafted tokens in one call (SpecInfer, Miao et al. 2023,
    https://arxiv.org/abs/2305.09781; Medusa, Cai et al. 2024, https://arxiv.org/abs/2401.10774).
    The queries are the tree's tokens, and so are the last q_len keys; the kv_len - q_len keys
    before them are the context. kv_len is at least q_len.

    Args:
        ancestors: bool, ``ancestors[..., i, j]`` whether token i sees token j, itself included: of
            dims ``("batch", "q_len", "q_len")``, or ``("q_len", "q_len")`` where all sequences
            draft the same tree. None declares the former, named ``ancestors``.
    """
    if ancestors is None:
        table = Tensor(
            "ancestors",
            ("batch", "q_len", "q_len"),
            "bool",
            doc="Whether a drafted token sees another: itself and its ancestors.",
        )
    else:
        example = "Tensor('ancestors', ('batch', 'q_len', 'q_len'), 'bool')"
        table = declared("tree", "ancestors", ancestors, example)
    dims = tuple(map(str, table.dims))
    if table.dtype != "bool" or dims not in (("q_len", "q_len"), ("batch", "q_len", "q_len")):
        raise MaskError(
            f"tree: ancestors={table!r}; declare it with dtype='bool' and dims "
            "('batch', 'q_len', 'q_len') or ('q_len', 'q_len')"
        )

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        context = kv_len - q_len
        drafted = (q_idx, maximum(kv_idx - context, 0))
        sees = table[(b, *drafted) if len(dims) == 3 else drafted]
        return (kv_idx < context) | ((kv_idx >= context) & sees)

    return Mask(mask_mod, label("tree", ancestors), moves=False)


def block_sparse(layout: Any = None, block: int | Int = 128) -> Mask:
    """A query sees the keys of the blocks that a table shows to its own block.

    A layout that is known now, ``block_sparse([[1, 0], [1, 1]], 64)``, becomes part of the module:
    ``attention`` takes none. R by C blocks are for up to ``R * block`` queries and ``C * block``
    keys, and shorter sequences see the blocks that they reach: ``attention`` raises ValueError for
    longer ones, and for other numbers of heads than a layout has tables for.

    Args:
        layout: bool, ``layout[..., i, j]`` whether the i-th block of queries sees the j-th block of
            keys. A layout that the call passes is a `Tensor`: two dimensions of
            ``ceil(q_len / block)`` and ``ceil(kv_len / block)`` (None where the table may be
            larger), after ``"batch"``, ``"num_q_heads"``, both, or none. A layout that is known now
            is a table of bools or of 0 and 1 for all heads, or a list of tables, one for each head:
            lists, a torch tensor, a numpy array, or a `Constant` with a name of your choice. None
            declares ``layout``, a Tensor with one table for each head.
        block: positions a block: a number, or an `Int` with min=1 that the call chooses.
    """
    size = divisor("block_sparse", "block", block)
    doc = "Whether a block of queries sees one of keys."
    table = _block_table("block_sparse", "layout", layout, size, "layout", doc)
    if table.dtype != "bool" or len(table.dims) < 2:
        raise MaskError(
            f"block_sparse: layout={table!r}; declare it with dtype='bool' and a dimension each "
            "for the blocks of queries and of keys"
        )
    leading = table.names[:-2]
    if not set(leading) <= {"batch", "num_q_heads", "1"}:
        raise MaskError(
            f"block_sparse: layout={table!r}; before the blocks of queries and of keys "
            "its dimensions can be batch, num_q_heads and 1"
        )

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = {"batch": b, "num_q_heads": h, "1": 0}
        return table[(*(at[dim] for dim in leading), q_idx // size, kv_idx // size)]

    shown = None if layout is None else table
    return Mask(mask_mod, label("block_sparse", shown, f"block={block}"), moves=False)


def bigbird(
    block: int | Int,
    window: int | Expr = 3,
    global_blocks: int | Expr = 1,
    random: Any = None,
) -> Mask:
    """A query sees the blocks around its own, the global blocks, and random ones.

    BigBird (Zaheer et al. 2020, https://arxiv.org/abs/2007.14062, section 2 and appendix D): the
    first blocks are global: they see every key, and every query sees them. q_len and kv_len are
    equal.

    Args:
        block: positions a block: a number, or an `Int` with min=1 that the call chooses.
        window: blocks seen around a query's own, its own included: odd; 3 is one on either side.
        global_blocks: how many of the first blocks are global.
        random: bool, ``random[h, i, j]`` whether head h shows the j-th block of keys to the i-th of
            queries, as `random_blocks` draws it. It takes what `block_sparse` takes as a layout, so
            a table drawn now becomes part of the module. None declares ``random_blocks``, a Tensor
            with one table for each head.
    """
    size = divisor("bigbird", "block", block)
    around = whole("bigbird", "window", window)
    first = whole("bigbird", "global_blocks", global_blocks, least=0)
    if isinstance(window, int) and (window < 1 or window % 2 == 0):
        raise MaskError(f"bigbird: window={window}; give an odd number of blocks from 1 up")
    doc = "Whether a block of queries sees a block of keys beside the others."
    table = _block_table("bigbird", "random", random, size, "random_blocks", doc)
    drawn = block_sparse(table, size).mask_mod

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_block, kv_block, reach = q_idx // size, kv_idx // size, around(b, h) // 2
        near = (kv_block >= q_block - reach) & (kv_block <= q_block + reach)
        is_global = (q_block < first(b, h)) | (kv_block < first(b, h))
        return is_global | near | drawn(b, h, q_idx, kv_idx)

    name = label("bigbird", block, window, global_blocks, None if random is None else table)
    return Mask(mask_mod, name, equal_lengths=True, moves=False)


def random_blocks(
    num_q_heads: int,
    length: int,
    block: int,
    count: int = 3,
    *,
    window: int = 3,
    global_blocks: int = 1,
    generator: torch.Generator | None = None,
    device: Any = None,
) -> torch.Tensor:
    """Draws BigBird's random blocks, for the call or the build of a module of `bigbird`.

    Args:
        num_q_heads: heads of q; each has a table of its own.
        length: q_len and kv_len.
        block: as given to `bigbird`, like ``window`` and ``global_blocks``.
        count: blocks drawn for each block of queries, none twice and none that it sees anyway;
            fewer if fewer are left.
        window: blocks seen around a query's own.
        global_blocks: how many of the first blocks are global.
        generator: torch's generator, for reproducible tables.
        device: where the table goes.

    Returns:
        bool (num_q_heads, ceil(length / block), ceil(length / block)).
    """
    import torch

    blocks = -(-length // block)
    at = torch.arange(blocks)
    seen = (at[:, None] - at).abs() <= window // 2
    seen |= (at < global_blocks) | (at[:, None] < global_blocks)
    lots = torch.rand(num_q_heads, blocks, blocks, generator=generator).masked_fill(seen, -1.0)
    best, chosen = lots.topk(min(count, blocks), dim=-1)
    table = torch.zeros(lots.shape, dtype=torch.bool).scatter(-1, chosen, best >= 0)
    return table.to(device)


def _block_table(
    owner: str, argument: str, given: Any, block: int | Int, name: str, doc: str
) -> Tensor:
    """The table of blocks that a mask is given; without one, a declared table for each head.

    Args:
        owner: the mask, for the error.
        argument: the name of the table's argument, for the error.
        given: a `Tensor`, or what can become a `Constant`, which then covers as many positions as
            it has blocks for.
        block: positions a block.
        name: the name of a table without one.
        doc: the doc of such a table.

    Raises:
        MaskError: ``given`` is not a table of bools.
    """
    if given is None:
        rows, columns = ((length + (block - 1)) // block for length in (q_len, kv_len))
        return Tensor(name, ("num_q_heads", rows, columns), "bool", doc=doc)
    if isinstance(given, Constant):
        table = given
    elif isinstance(given, Tensor):
        return given
    elif isinstance(given, int | Int):
        raise MaskError(
            f"{owner}: {argument}={given!r}; give a table of bools, and positions a block as block="
        )
    else:
        elements = elements_of(f"{owner}: values of {argument}", given, "bool")
        table = Constant(name, elements, "bool", doc=doc)
    sizes = table.elements.shape
    if len(sizes) not in (2, 3):
        raise MaskError(
            f"{owner}: {argument}={table!r}; give bools in rows of blocks, or a list of such "
            "tables, one for each head"
        )
    heads = () if len(sizes) == 2 else (None,) if sizes[0] == 1 else ("num_q_heads",)
    return table.but("bool", (*heads, ("q_len", block), ("kv_len", block)))
