"""FlexAttention's call: `flex_attention` with torch's arguments, computed by flashgen's modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from flashgen.errors import MaskError, ValidationError
from flashgen.integrations.block_table import BlockTables, block_tables
from flashgen.integrations.call_tensors import (
    autocast,
    padded,
    precision_of,
    supported_head_dim,
    targets_of,
)
from flashgen.integrations.captured_tensor import sizes_of
from flashgen.integrations.captures import Captures
from flashgen.integrations.variants import Form, Variant, explained, symbols_of, variant_of

__all__ = ["Prepared", "flex_attention", "prepare"]

#: What `torch.nn.attention.flex_attention.FlexKernelOptions` has: none changes what is computed.
_KERNEL_OPTIONS = frozenset(theirs.FlexKernelOptions.__annotations__)

#: A block of this size, or larger, in both directions is FlexAttention's way to write no table.
_NO_TABLE = theirs._LARGE_SPARSE_BLOCK_SIZE

_WHERE_TRACED = (
    "flashgen.flex.flex_attention was called in code that torch.compile traces, which cannot trace "
    "flashgen; before, make attend = flashgen.flex.prepare(query, key, value, score_mod, "
    "block_mask), and call attend(query, key, value) in there"
)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    fallback: str | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`, with a module of flashgen for its kernel.

    The functions are traced as they are. Tensors that they capture are parameters of the module,
    and have gradients; q_idx and kv_idx count from 0 for both, as in torch, also for unequal
    lengths. The first call with a function compiles: see `flashgen.compile`.

    Args:
        query: (batch, num_q_heads, q_len, qk_head_dim), float16, bfloat16 or float32.
        key: (batch, num_kv_heads, kv_len, qk_head_dim).
        value: (batch, num_kv_heads, kv_len, v_head_dim).
        score_mod: ``(score, b, h, q_idx, kv_idx) -> number``.
        block_mask: its ``mask_mod`` is the mask. Its table is compared with that once per object,
            and joined to the mask where it says something else.
        scale: factor on ``query @ key.T``; None is ``qk_head_dim ** -0.5``.
        enable_gqa: whether num_q_heads may be a multiple of num_kv_heads.
        return_lse: whether to return the log-sum-exp too.
        kernel_options: of torch's kernels, without effect here.
        return_aux: ``AuxRequest(lse=True)`` for ``AuxOutput(lse=...)``. max_scores is refused.
        fallback: ``"torch"``: a call that flashgen refuses is computed by torch's FlexAttention.

    Returns:
        out, (batch, num_q_heads, q_len, v_head_dim), whose strides are in query's order; with
        return_lse (out, lse), and with return_aux (out, AuxOutput). lse is float32
        (batch, num_q_heads, q_len), natural logarithm.

    Raises:
        MaskError: a function cannot be traced: the message has its line. Or a captured tensor of
            int64 or float64 has numbers that 32 bits do not hold; those of a GPU are waited for if
            there is a fallback, and end in an error of the GPU's if there is none.
        TypeError, ValueError: naming the argument, what was given and what is accepted.
        RuntimeError: torch.compile traces this call: see `prepare`.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(_WHERE_TRACED)
    attend = _attend if "torch._dynamo" not in sys.modules else _untraced()
    return attend(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux, fallback,
    )  # fmt: skip


@functools.cache
def _untraced() -> Callable[..., Any]:
    """`_attend`, without torch.compile looking into it where it gave up on the caller."""
    untraced: Callable[..., Any] = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
    return untraced


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Mapping[str, Any] | None,
    return_aux: AuxRequest | None,
    fallback: str | None,
) -> Any:
    """What `flex_attention` returns."""
    if fallback not in (None, "torch"):
        raise ValueError(f"fallback: got {fallback!r}; pass 'torch' or None")
    query, key, value = autocast(query, key, value)
    try:
        _check_scale(scale)
        attend = _found(query, key, value, score_mod, block_mask, enable_gqa, kernel_options)
        _check_request(return_lse, return_aux)
        captured = attend.captured(query.device, waits=fallback is not None)
    except (MaskError, ValidationError, NotImplementedError) as error:
        if fallback is None:
            kind = NotImplementedError if isinstance(error, NotImplementedError) else MaskError
            raise kind(explained(error)) from error
        torchs: Any = theirs.flex_attention
        given = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        return torchs(*given, kernel_options, return_aux=return_aux)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    out, lse = attend.run(query, key, value, scale, wants_lse, captured)
    if return_aux is not None:
        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    *,
    enable_gqa: bool = False,
) -> Prepared:
    """What `flex_attention` does before it computes, for calls in code that torch.compile traces.

    Args:
        query: with key and value tensors like those of the calls: of their dtypes, sizes and
            device; they may be on the meta device if there is no block_mask.
        key: see query.
        value: see query.
        score_mod: as `flex_attention` takes it.
        block_mask: as `flex_attention` takes it.
        enable_gqa: as `flex_attention` takes it.

    Returns:
        A function ``(query, key, value, *, scale=None, return_lse=False)``. It holds what the
        functions capture now: tensors themselves, which may be written to, and values of numbers.

    Raises:
        MaskError, ValidationError: a function cannot be traced: the message has its line.
    """
    return _found(query, key, value, score_mod, block_mask, enable_gqa, None)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A variant with what its functions captured; see `prepare`."""

    _variant: Variant
    _captures: Captures
    _tables: dict[str, torch.Tensor]
    _lengths: tuple[int, int] | None
    _head_dims: tuple[int, int]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The attention, as `flex_attention` computes it.

        Raises:
            MaskError: a captured tensor on the CPU has numbers that 32 bits do not hold.
            ValueError: other lengths, where the functions or the BlockMask are for these alone.
        """
        lengths = self._lengths
        if lengths is not None and (query.shape[2], key.shape[2]) != lengths:
            raise ValueError(
                f"query, key: got q_len {query.shape[2]} and kv_len {key.shape[2]}; it was "
                f"prepared for {lengths[0]} and {lengths[1]}"
            )
        captured = self.captured(query.device)
        out, lse = self.run(query, key, value, scale, return_lse, captured)
        return (out, lse) if return_lse else out

    def captured(self, device: torch.device, *, waits: bool = False) -> dict[str, Any]:
        """The module's arguments for what is captured; see `Variant.arguments`."""
        return self._variant.arguments(self._captures, device, waits=waits)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        return_lse: bool,
        captured: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and the log-sum-exp if it is asked for."""
        variant, given = self._variant, query
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        width, v_width = query.shape[-1], value.shape[-1]
        if (width, v_width) != self._head_dims:
            if scale is None:
                scale = width**-0.5
            query, key = (padded(x, self._head_dims[0]) for x in (query, key))
            value = padded(value, self._head_dims[1])
        if key.shape[0] != query.shape[0]:
            key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
        result = variant.module.attention(
            query,
            key,
            value,
            scale=scale,
            return_lse=return_lse,
            **captured,
            **self._tables,
        )
        out, lse = result if return_lse else (result, None)
        return _laid_out_as(given, out if out.shape[-1] == v_width else out[..., :v_width]), lse


def _laid_out_as(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The output with its dimensions in memory as query has them: torch promises that.

    Callers rely on it where heads are the third dimension of what they view as rows.
    """
    order = sorted(range(4), key=query.stride, reverse=True)
    if order == [0, 1, 2, 3]:
        return out
    back = sorted(range(4), key=order.__getitem__)
    return out.permute(order).contiguous().permute(back)


_NO_TABLES = BlockTables(None, None, (1, 1))


def _found(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | None,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None,
) -> Prepared:
    """The variant for a call, with what its functions capture now."""
    _check_shapes(query, key, value, block_mask, enable_gqa)
    if kernel_options:
        _check_options(kernel_options)
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    sizes = sizes_of(query, key)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    captures = Captures(mask_mod, score_mod)
    tables = _NO_TABLES
    if block_mask is not None and min(block_mask.BLOCK_SIZE) < _NO_TABLE:
        tables = block_tables(
            block_mask,
            lambda: symbols_of(mask_mod, Captures(mask_mod), sizes),
            captures.first,
            (query.shape[0], query.shape[1]),
        )
    head_dims = (supported_head_dim(query.shape[-1]), supported_head_dim(value.shape[-1]))
    form = Form(head_dims, query.dtype, precision_of(query), tables.key, targets_of(query.device))
    variant = variant_of((score_mod, mask_mod), captures, sizes, form, tables)
    fixed = block_mask is not None or bool(variant.nonnegative or variant.exact)
    lengths = (query.shape[2], key.shape[2]) if fixed else None
    return Prepared(variant, captures, tables.arguments, lengths, head_dims)


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask | None,
    enable_gqa: bool,
) -> None:
    """Raises for sizes that torch refuses; the module checks the others."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; pass a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got {x.dim()} dimensions; pass (batch, heads, seq, head_dim)"
            )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise NotImplementedError(
            f"query: got {query.dtype}; flashgen's kernels are for float16, bfloat16 and float32"
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: got {x.dtype}, query is {query.dtype}; pass one dtype")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"key: got {key.shape[1]} heads for {query.shape[1]} of query; pass enable_gqa=True "
            "if groups of heads share keys"
        )
    if query.shape[0] != key.shape[0] and (block_mask is None or key.shape[0] != 1):
        raise ValueError(
            f"key: got batch {key.shape[0]}, query has {query.shape[0]}; pass equal batches, or "
            "one of 1 beside a block_mask"
        )


def _check_block_mask(mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises for a BlockMask that torch refuses."""
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask: got {type(mask).__name__}; pass a BlockMask, as create_block_mask makes "
            "of a mask function"
        )
    if mask.mask_mod is theirs._sliced_mask_mod_error:
        raise ValueError(
            "block_mask: it was sliced, and has no mask_mod any more; set its mask_mod to one that "
            "means the slice's positions"
        )
    lengths = (query.shape[2], key.shape[2])
    if min(mask.BLOCK_SIZE) < _NO_TABLE and tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask: it is for q_len {mask.seq_lengths[0]} and kv_len {mask.seq_lengths[1]}, "
            f"and query and key have {lengths[0]} and {lengths[1]}; make one for these"
        )
    if mask.kv_num_blocks.device != query.device:
        raise ValueError(
            f"block_mask: is on {mask.kv_num_blocks.device}, query on {query.device}; pass one "
            "device"
        )
    sizes = mask.kv_num_blocks.shape[:-1]
    for name, size, expected in zip(("batch", "heads"), sizes, query.shape, strict=False):
        if size not in (1, expected):
            raise ValueError(
                f"block_mask: its table is for {size} of {name}, query has {expected}; make one "
                "for as many, or for 1"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    if unknown := sorted(set(options) - _KERNEL_OPTIONS):
        raise ValueError(
            f"kernel_options: {', '.join(unknown)}: not an option of FlexAttention's kernels; "
            "leave it out"
        )


def _check_scale(scale: float | None) -> None:
    if scale is not None and scale <= 0:
        raise NotImplementedError(
            f"scale: got {scale}; flashgen's kernels are for a positive one; multiply query by it "
            "and pass 1"
        )


def _check_request(return_lse: bool, request: AuxRequest | None) -> None:
    if request is None:
        return
    if return_lse:
        raise ValueError("return_lse: is given beside return_aux; pass return_aux alone")
    if request.max_scores:
        raise NotImplementedError(
            "return_aux: max_scores=True: flashgen's kernels keep no maxima of rows; leave it out"
        )
