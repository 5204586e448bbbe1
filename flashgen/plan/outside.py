"""Tensors that an index may leave: there kernels read 0, and so does `reference`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashgen.constants import Constant
from flashgen.params import Tensor
from flashgen.symbols import BATCH, KV_IDX, KV_LEN, Q_HEADS, Q_IDX, Q_LEN, B, H, Load

#: What an index is below, by its own form.
_BELOW = {B: BATCH, H: Q_HEADS, Q_IDX: Q_LEN, KV_IDX: KV_LEN}


def left_by(
    exprs: Iterable[Any], tensors: Iterable[Tensor], *, equal_lengths: bool
) -> tuple[str, ...]:
    """The names of tensors that some element in the expressions may lie outside of.

    Args:
        exprs: mask, score and sink.
        tensors: what they may read.
        equal_lengths: there are as many queries as keys.
    """
    by_symbol = {tensor.sym: tensor for tensor in tensors}
    found = {
        load.args[0]: None
        for expr in exprs
        for load in sorted(expr.atoms(Load), key=str)
        if load.args[0] in by_symbol
        and not _is_inside(load.args[1:], by_symbol[load.args[0]], equal_lengths)
    }
    return tuple(tensor.name for symbol, tensor in by_symbol.items() if symbol in found)


def _is_inside(indices: tuple[Any, ...], tensor: Tensor, equal_lengths: bool) -> bool:
    if isinstance(tensor, Constant):
        limited = {of for of, _ in tensor.limits}  # calls with more positions are refused
        return all(index in _BELOW and str(_BELOW[index]) in limited for index in indices)
    alike = {Q_LEN: KV_LEN} if equal_lengths else {}
    for index, dim in zip(indices, tensor.dims, strict=True):
        if dim is None:
            return False
        if index.is_Integer and dim.sym.is_Integer:
            if not 0 <= index < dim.sym:
                return False
        elif index not in _BELOW or dim.sym.xreplace(alike) != _BELOW[index].xreplace(alike):
            return False
    return True
