"""Operators of Triton's interpreter in one step of numpy each, where the operands are plain.

Triton's own way from ``a + b`` to numpy takes some forty calls: it makes types, checks them, fills
a block with each number and broadcasts. What follows from types is looked up here instead, numpy
broadcasts, and the result is the same: `test_interpreter.py` compares every operator with Triton's.
Whatever is not plain (bfloat16, pointers but for offsets, errors of any kind) goes Triton's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_semantic

from sweep.quick_operands import FLOATS, INT32, NUMPY, made, operands

_load = interpreter._interpreter.load
_UINT16 = np.dtype(np.uint16)  # what numpy has of bfloat16


def _arithmetic(slow: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """A sum, difference or product: of integers as far as they fit their type."""

    def quick(a: Any, b: Any, sanitize_overflow: bool) -> Any:
        if (known := operands(a, b)) is None:
            return slow(a, b, sanitize_overflow)
        x, y, common, is_block = known
        kind = id(common)
        try:
            if kind in FLOATS or common is tl.int64:
                data = function(x, y)
            elif kind == INT32:
                exact = function(x, y, dtype=np.int64)
                if sanitize_overflow and not _fits(exact):
                    return slow(a, b, sanitize_overflow)
                data = exact.astype(np.int32)
            else:
                return slow(a, b, sanitize_overflow)
        except ValueError:  # shapes that do not go together
            return slow(a, b, sanitize_overflow)
        return made(data, common, is_block)

    return quick


def _fits(exact: Any) -> bool:
    if exact.size == 1:
        return -(2**31) <= exact.item() < 2**31
    return bool(exact.min() >= -(2**31) and exact.max() < 2**31)


def _add(slow: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and offsets of pointers."""
    add = _arithmetic(slow, np.add)

    def quick(a: Any, b: Any, sanitize_overflow: bool) -> Any:
        if type(a) is tl.tensor and type(a.dtype) is tl.pointer_type and type(b) is tl.tensor:
            offset = b.dtype
            if id(offset) in NUMPY and offset.is_int_signed():
                size = max(1, a.dtype.element_ty.primitive_bitwidth // 8)
                x, y = a.handle.data, b.handle.data
                try:
                    data = x + size * y.astype(np.uint64)
                except ValueError:
                    return slow(a, b, sanitize_overflow)
                is_block = a.type is not a.dtype or b.type is not offset
                return made(data, a.dtype, is_block)
        return add(a, b, sanitize_overflow)

    return quick


def _in_one_step(
    slow: Callable[..., Any],
    function: Any,
    *,
    gives: Any = None,
    divides: bool = False,
    of_floats: bool | None = None,
) -> Callable[..., Any]:
    """One function of numpy.

    Args:
        slow: Triton's way.
        function: the function.
        gives: the type of the result, where it is not that of the operands.
        divides: whether the types are those of a division.
        of_floats: whether it is of floats alone, or of integers alone.
    """

    def quick(a: Any, b: Any, *options: Any) -> Any:
        if (known := operands(a, b, divides)) is None:
            return slow(a, b, *options)
        x, y, common, is_block = known
        if of_floats is not None and of_floats != (id(common) in FLOATS):
            return slow(a, b, *options)
        try:
            data = function(x, y)
        except ValueError:
            return slow(a, b, *options)
        return made(data, gives or common, is_block)

    return quick


def _where(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(condition: Any, a: Any, b: Any) -> Any:
        known = operands(a, b) if type(condition) is tl.tensor else None
        if known is None or condition.dtype is not tl.int1 or not condition.handle.data.ndim:
            return slow(condition, a, b)
        x, y, common, is_block = known
        try:
            data = np.where(condition.handle.data, x, y)
        except ValueError:
            return slow(condition, a, b)
        is_block |= condition.type is not condition.dtype
        return made(data, common, is_block)

    return quick


def _expand_dims(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(x: Any, axis: int) -> Any:
        if type(x) is not tl.tensor or x.type is x.dtype or type(axis) is not int:
            return slow(x, axis)
        if not 0 <= axis <= x.handle.data.ndim:
            return slow(x, axis)
        data = x.handle.data[(slice(None),) * axis + (None,)]
        return made(data, x.dtype, True)

    return quick


def _cast(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(x: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
        if type(x) is not tl.tensor or not isinstance(dtype, tl.dtype):
            return slow(x, dtype, fp_downcast_rounding)
        before, after = x.dtype, dtype.scalar
        if before is after:
            return x
        known = id(before) in NUMPY and id(after) in NUMPY and after is not tl.int1
        if not known or fp_downcast_rounding is not None or dtype is not after:
            return slow(x, dtype, fp_downcast_rounding)
        return made(x.handle.data.astype(NUMPY[id(after)]), after, x.type is not before)

    return quick


def _load_of(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks by a block of pointers."""

    def quick(ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        boundary_check, padding, cache, eviction, _ = options
        kind = ptr.dtype
        element = getattr(kind, "element_ty", None)
        of_numpy = _UINT16 if element is tl.bfloat16 else NUMPY.get(id(element))
        plain = not (boundary_check or padding or cache) and eviction in ("", "evict_last")
        if ptr.type is kind or of_numpy is None or element is tl.int1 or not plain:
            return slow(ptr, mask, other, *options)
        addresses, shape = ptr.handle.data, ptr.handle.data.shape
        if mask is None:
            shown = np.ones(shape, dtype=bool)
        elif mask.dtype is tl.int1 and mask.handle.data.dtype == np.bool_:
            shown = mask.handle.data
        else:
            return slow(ptr, mask, other, *options)
        if other is None:
            instead = np.zeros(shape, dtype=of_numpy)
        elif mask is not None and other.dtype is element and other.handle.data.size != 1:
            instead = other.handle.data
        elif mask is not None and other.handle.data.size == 1 and not other.handle.data.any():
            instead = np.zeros(shape, dtype=of_numpy)  # no matter of which type
        else:
            return slow(ptr, mask, other, *options)
        if shown.shape != shape or instead.shape != shape:
            try:
                shown = np.broadcast_to(shown, shape)
                instead = np.broadcast_to(instead, shape)
            except ValueError:  # the pointers may have to be broadcast
                return slow(ptr, mask, other, *options)
        data = _load(addresses, shown, instead, of_numpy)
        return made(data, element, True)

    return quick


def _quotient_of_integers(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y


_COMPARISONS = {
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
_OF_INTEGERS = {
    "floordiv": (_quotient_of_integers, True),
    "mod": (np.fmod, True),
    "and_": (np.bitwise_and, False),
    "or_": (np.bitwise_or, False),
    "xor_": (np.bitwise_xor, False),
}

#: What is replaced in `TritonSemantic`: name -> of what Triton has there, what stands there then.
QUICK: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "add": _add,
    "sub": partial(_arithmetic, function=np.subtract),
    "mul": partial(_arithmetic, function=np.multiply),
    "truediv": partial(_in_one_step, function=np.divide, divides=True, of_floats=True),
    "minimum": partial(_in_one_step, function=np.minimum),
    "maximum": partial(_in_one_step, function=np.maximum),
    **{
        name: partial(_in_one_step, function=function, gives=tl.int1)
        for name, function in _COMPARISONS.items()
    },
    **{
        name: partial(_in_one_step, function=function, divides=divides, of_floats=False)
        for name, (function, divides) in _OF_INTEGERS.items()
    },
    "where": _where,
    "expand_dims": _expand_dims,
    "cast": _cast,
    "load": _load_of,
}


def _convert_float_of(slow: Callable[..., Any]) -> Callable[..., Any]:
    """bfloat16 is the upper half of float32: to float32, and back where nothing is rounded."""

    def quick(data: Any, before: Any, after: Any, rounding: Any) -> Any:
        if before is tl.bfloat16 and after is tl.float32:
            bits = data.view(np.uint16)
            if not _has_subnormals(bits, 7):
                return bits.astype(np.uint32) << 16
        elif before is tl.float32 and after is tl.bfloat16 and rounding is None:
            bits = data.view(np.uint32)
            if not _has_subnormals(bits, 23):
                return (bits >> 16).astype(np.uint16)
        return slow(data, before, after, rounding)

    return quick


def _has_subnormals(bits: Any, mantissa: int) -> bool:
    """Whether floats of 8 bits of exponent have some, which Triton rounds as it likes."""
    magnitude = bits & ((1 << (mantissa + 8)) - 1)
    return bool(((magnitude < 1 << mantissa) & (magnitude != 0)).any())


def quicken_operators() -> None:
    """Puts them there, for the interpreter alone."""
    slow = interpreter._convert_float
    interpreter._convert_float = functools.wraps(slow)(_convert_float_of(slow))
    for name, quick in QUICK.items():
        slow = getattr(interpreter_semantic, name)
        setattr(interpreter_semantic, name, functools.wraps(slow)(quick(slow)))


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _as_tensor(x: Any) -> Any:
    return x if type(x) is tl.tensor else interpreter_semantic.to_tensor(x)


def _methods(name: str, of: Callable[[Any], Any], *more: Any) -> tuple[Any, Any]:
    """An operator of tensors, and the same of one on the right."""
    return (
        lambda a, b: getattr(interpreter_semantic, name)(a, of(b), *more),
        lambda a, b: getattr(interpreter_semantic, name)(of(b), a, *more),
    )


#: What tensors have for Python's operators, while kernels run: each goes straight to its operation.
OF_TENSORS: dict[str, Callable[..., Any]] = {}
for _python, _ours, _of, *_more in (
    ("add", "add", _plain, True),
    ("sub", "sub", _plain, True),
    ("mul", "mul", _plain, True),
    ("truediv", "truediv", _plain),
    ("floordiv", "floordiv", _plain),
    ("mod", "mod", _plain),
    ("and", "and_", _plain),
    ("or", "or_", _plain),
    ("xor", "xor_", _plain),
    ("lt", "less_than", _as_tensor),
    ("le", "less_equal", _as_tensor),
    ("gt", "greater_than", _as_tensor),
    ("ge", "greater_equal", _as_tensor),
    ("eq", "equal", _as_tensor),
    ("ne", "not_equal", _as_tensor),
):
    OF_TENSORS[f"__{_python}__"], OF_TENSORS[f"__r{_python}__"] = _methods(_ours, _of, *_more)
