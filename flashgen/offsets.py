"""Offsets: a mask or a score function of a part of a sequence, in positions of the whole.

A module of the form "mesh" computes some of the queries with some of the keys of a sequence. Its
calls say where these begin, ``q_offset`` and ``kv_offset``, and, if mask or score read the lengths,
how long the whole is. So the expression that the user wrote keeps its meaning, and bounds are
derived from it, and from the offsets, as from any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from flashgen.constants import Constant
from flashgen.declared import Param
from flashgen.masks import Mask
from flashgen.params import Int, Tensor
from flashgen.scores import Score
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN
from flashgen.tracing.expr import Expr, apply, bound, is_bound, merged_params, values_now

#: Where the queries and the keys of a call begin in the whole.
Q_OFFSET = Int("q_offset", default=0, doc="position of the first query in the whole")
KV_OFFSET = Int("kv_offset", default=0, doc="position of the first key in the whole")

#: Which head of the whole the first head of q is: dropout reads it, and the two above.
HEAD_OFFSET = Int("head_offset", default=0, doc="number of the first head of q in the whole")
DROPOUT_OFFSETS = (Q_OFFSET, KV_OFFSET, HEAD_OFFSET)

#: The lengths of the whole, in place of those of a call.
WHOLE_LENGTHS = {
    Q_LEN: Int("whole_q_len", min=1, doc="number of queries of the whole"),
    KV_LEN: Int("whole_kv_len", min=1, doc="number of keys of the whole"),
}

#: All of these by name.
OFFSETS = {param.name: param for param in (*DROPOUT_OFFSETS, *WHOLE_LENGTHS.values())}

_Function = TypeVar("_Function", bound=Mask | Score)


def with_offsets(function: _Function) -> _Function:
    """A mask, or a score function, whose indices count from the offsets of the call.

    Declared tensors keep the sizes of the whole. A function that has offsets is returned as it is.
    """
    if function.offset:
        return function
    field = "mask_mod" if isinstance(function, Mask) else "score_mod"
    inner: Callable[..., Any] = getattr(function, field)

    def moved(*arguments: Any) -> Any:
        *others, q_idx, kv_idx = arguments
        if is_bound():
            values = values_now()  # without an offset that the function does not read
            offsets = (values.get(offset.name, 0) for offset in (Q_OFFSET, KV_OFFSET))
            positions = (i + offset for i, offset in zip((q_idx, kv_idx), offsets, strict=True))
            with bound(_values_of_whole()):
                return inner(*others, *positions)
        return _placed(inner(*arguments))

    changes: dict[str, Any] = {field: moved, "equal_lengths": False, "moves": False, "along": None}
    return replace(function, **changes, parts=(function,), offset=True)  # type: ignore[arg-type]


def _placed(result: Any) -> Any:
    """What a function returned for symbols, in positions of the whole."""
    if not isinstance(result, Expr):
        return result
    read = result.sym.free_symbols
    sizes = (dim for param in result.params if isinstance(param, Tensor) for dim in param.dims)
    read = read.union(*(size.sym.free_symbols for size in sizes if size is not None))
    places: dict[Any, Expr] = {
        index: apply("+", Expr(index), offset)
        for index, offset in ((Q_IDX, Q_OFFSET), (KV_IDX, KV_OFFSET))
    }
    places |= WHOLE_LENGTHS
    used = {symbol: place for symbol, place in places.items() if symbol in read}
    params = [_resized(param) for param in result.params]
    sym = result.sym.xreplace({symbol: place.sym for symbol, place in used.items()})
    return Expr(sym, merged_params([Expr(sym, tuple(params)), *used.values()]))


def _resized(param: Param) -> Param:
    """A declared tensor whose sizes are those of the whole; any other parameter as it is."""
    if not isinstance(param, Tensor) or isinstance(param, Constant):
        return param
    dims = tuple(dim if dim is None else _size(dim) for dim in param.dims)
    return Tensor(param.name, dims, param.dtype, sorted=param.sorted, doc=param.doc)


def _size(dim: Expr) -> Expr | int | str:
    """A dimension, as a tensor is declared with it."""
    used = [place for symbol, place in WHOLE_LENGTHS.items() if symbol in dim.sym.free_symbols]
    if dim.sym.is_Integer:
        return int(dim.sym)
    sym = dim.sym.xreplace({symbol: place.sym for symbol, place in WHOLE_LENGTHS.items()})
    return Expr(sym, merged_params([dim, *used])) if used or dim.params else str(dim.sym)


def _values_of_whole() -> dict[str, Any]:
    """The values of a call, where lengths are those of the whole."""
    values = dict(values_now())
    for symbol, length in WHOLE_LENGTHS.items():
        if length.name in values:
            values[symbol.name] = values[length.name]
    return values
