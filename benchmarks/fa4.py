"""FlashAttention 4 as a peer: each attention in the fastest way that its interface offers.

Full, causal, a window and capped scores are arguments, and packed documents use the varlen
function. Chunks that divide the sequence are passed as separate sequences, at no cost. ALiBi is a
score function; a prefix, and sinks with a window, are mask functions with a table of blocks, in
`fa4_mods`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.accuracy import Inputs
from benchmarks.attentions import CAP, CHUNK, DOCUMENT, PREFIX, SINKS, WINDOW, Attention
from benchmarks.cells import Cell

Call = Callable[[], torch.Tensor]

#: Arguments of flash_attn_func for the attentions that it has arguments for.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "softcap": {"causal": True, "softcap": CAP},
    "chunked": {"causal": True},
}
#: The attentions with functions in CuTe.
SCORED = ("alibi",)
MASKED = ("prefix", "sink_window")


@contextmanager
def fa4(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """FlashAttention 4, if it is installed; it takes (batch, seq, heads, head_dim).

    Raises:
        ImportError: it is not installed.
        NotImplementedError: it cannot express this attention.
    """
    from flash_attn.cute import (  # type: ignore[import-not-found]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    name, length = cell.attention, cell.seq_len
    tensors = tuple(x.transpose(1, 2).contiguous() for x in inputs)
    function: Callable[..., Any]
    if name == "documents":
        tensors = tuple(x.flatten(0, 1) for x in tensors)
        ends = ends_of(attention.parameters["document_ids"])
        longest = int(ends.diff().max())
        function = partial(
            flash_attn_varlen_func,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
    elif name == "window":
        left = attention.parameters["left"]
        function = partial(flash_attn_func, causal=True, window_size=(left, 0))
    elif name == "chunked" and length % CHUNK == 0:
        tensors = tuple(x.reshape(-1, CHUNK, *x.shape[2:]) for x in tensors)
        function = partial(flash_attn_func, **ARGUMENTS[name])
    elif name in ARGUMENTS and name != "chunked":
        function = partial(flash_attn_func, **ARGUMENTS[name])
    elif name in SCORED:
        function = partial(flash_attn_func, causal=True, score_mod=_mod(name))
    elif name in MASKED:
        function = _masked(flash_attn_func, cell, attention, inputs)
    elif attention.learned:
        raise NotImplementedError("no gradients of what a score function reads")
    else:
        raise NotImplementedError(f"no {name}")
    yield partial(heads_first, function, tensors, cell.batch)


@contextmanager
def fa4_mask_mod(cell: Cell, attention: Attention, inputs: Inputs) -> Iterator[Call]:
    """FlashAttention 4 with chunks as a mask function, which allows chunks of any length.

    Raises:
        ImportError: it is not installed.
        NotImplementedError: the attention is not chunked.
    """
    from flash_attn.cute import flash_attn_func

    if cell.attention != "chunked":
        raise NotImplementedError(f"no {cell.attention}")
    tensors = tuple(x.transpose(1, 2).contiguous() for x in inputs)
    function = _masked(flash_attn_func, cell, attention, inputs)
    yield partial(heads_first, function, tensors, cell.batch)


def document_ends(length: int, device: torch.device) -> torch.Tensor:
    """0 and the end of each packed document of `DOCUMENT` tokens, int32."""
    ends = torch.arange(0, length, DOCUMENT, dtype=torch.int32)
    return torch.cat([ends, torch.tensor([length], dtype=torch.int32)]).to(device)


def ends_of(ids: torch.Tensor) -> torch.Tensor:
    """0 and the end of each document of all sequences, by their ids (batch, seq_len), int32."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([ids.numel()])]).to(torch.int32)


def _masked(
    flash_attn_func: Callable[..., Any], cell: Cell, attention: Attention, inputs: Inputs
) -> Callable[..., Any]:
    from benchmarks.fa4_mods import blocks_of

    assert attention.mask_mod is not None
    blocks = blocks_of(attention.mask_mod, cell.seq_len, inputs[0].device)
    mod = _mod(cell.attention)
    return partial(flash_attn_func, mask_mod=mod, block_sparse_tensors=blocks)


def _mod(name: str) -> Any:
    from benchmarks import fa4_mods

    constants = {
        "alibi": (),
        "prefix": (PREFIX,),
        "chunked": (CHUNK,),
        "sink_window": (SINKS, WINDOW),
    }
    return getattr(fa4_mods, name)(*constants[name])


def heads_first(
    function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], batch: int
) -> torch.Tensor:
    """One call, its output as (batch, heads, seq, head_dim)."""
    result = function(*tensors)
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out.reshape(batch, -1, *out.shape[-2:]).transpose(1, 2)
