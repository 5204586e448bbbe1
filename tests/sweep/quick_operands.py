"""Operands of Triton's interpreter in numpy, and the type that they are computed in, looked up."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import interpreter_semantic

from sweep.quick_types import block_of, tensor_of

#: What numpy computes with as Triton's interpreter does, by type. Of unsigned integers that makes
#: some constants of types of its own.
PLAIN = {
    tl.int1: np.bool_,
    **{tl.int8: np.int8, tl.int16: np.int16, tl.int32: np.int32, tl.int64: np.int64},
    **{tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64},
}
NUMPY: dict[int, Any] = {id(kind): np.dtype(of_numpy) for kind, of_numpy in PLAIN.items()}
FLOATS = {id(kind) for kind in PLAIN if kind.is_floating()}
INT32 = id(tl.int32)


@functools.cache
def _number(kind: type, value: Any, dtype: Any) -> np.ndarray | None:
    """A number of Python's as Triton makes it of a type; None where it is for Triton to refuse."""
    if dtype.is_int() and not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
        return None
    constant = np.array([value or 0], dtype=NUMPY[id(dtype)])  # -0.0 is 0 there too
    constant.flags.writeable = False
    return constant


_common: dict[Any, Any] = {}


def _common_type(a: Any, of_number_a: bool, b: Any, of_number_b: bool, divides: bool) -> Any:
    """The type that two are computed in; None where that is not for numpy alone."""
    key = (id(a), of_number_a, id(b), of_number_b, divides)
    try:
        return _common[key]
    except KeyError:
        pass
    found = None
    if id(a) in NUMPY and id(b) in NUMPY:
        try:
            found = interpreter_semantic.computation_type_impl(
                a, of_number_a, b, of_number_b, divides
            )
        except TypeError:
            found = None
        # To a boolean Triton compares instead.
        if id(found) not in NUMPY or (found is tl.int1 and not a is b is tl.int1):
            found = None
    _common[key] = found  # all these types live as long as Triton does
    return found


def operands(a: Any, b: Any, divides: bool = False) -> tuple[Any, Any, Any, bool] | None:
    """Two values in numpy, the type that they are computed in, and whether one is a block."""
    if type(a) is tl.tensor:
        if type(b) is not tl.tensor:
            return _with_number(a, b, divides, number_first=False)
    elif type(b) is tl.tensor:
        return _with_number(b, a, divides, number_first=True)
    else:
        return None
    a_type, b_type = a.dtype, b.dtype
    x, y = a.handle.data, b.handle.data
    common = _common_type(a_type, False, b_type, False, divides)
    if common is None or not x.ndim or not y.ndim:
        return None
    if a_type is not common:
        x = x.astype(NUMPY[id(common)])
    if b_type is not common:
        y = y.astype(NUMPY[id(common)])
    return x, y, common, a.type is not a_type or b.type is not b_type


def _with_number(
    tensor: Any, number: Any, divides: bool, *, number_first: bool
) -> tuple[Any, Any, Any, bool] | None:
    kind = type(number)
    if kind is not int and kind is not float and kind is not bool:
        return None
    own, data = tensor.dtype, tensor.handle.data
    if (of_number := _type_of(kind, number)) is None or not data.ndim:
        return None
    pair = (of_number, True, own, False) if number_first else (own, False, of_number, True)
    common = _common_type(*pair, divides)
    constant = None if common is None else _number(kind, number, common)
    if constant is None:
        return None
    if own is not common:
        data = data.astype(NUMPY[id(common)])
    pair = (constant, data) if number_first else (data, constant)
    return *pair, common, tensor.type is not own


@functools.cache
def _type_of(kind: type, number: Any) -> Any:
    try:
        return interpreter_semantic.to_tensor_type(number)
    except ValueError:
        return None


def made(data: Any, dtype: Any, is_block: bool) -> Any:
    """A tensor of such elements."""
    return tensor_of(data, dtype, block_of(dtype, data.shape) if is_block else dtype)
