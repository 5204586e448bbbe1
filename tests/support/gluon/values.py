"""What registers hold: tensors of Triton's types; a number of the program has no dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

_Tensors = Callable[[Any, Any], torch.Tensor]


class Layout:
    """Which thread holds what: nothing here depends on it but what kernels read of layouts."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    @property
    def instr_shape(self) -> Any:
        """Of an accumulator: (rows, columns, depth) of one instruction."""
        return self.arguments[2]


class Block:
    """A tensor in registers; one without dimensions is a number of the program."""

    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        """As Triton has it, constants."""
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        """Of its elements, for kernels to ask."""
        return _dtype(self.data.dtype)

    @property
    def type(self) -> Any:
        """With a layout."""
        return SimpleNamespace(layout=Layout(), shape=self.shape)

    def to(self, dtype: Any) -> Block:
        """As another type; integers wrap, floats lose their fraction."""
        return Block(self.data.to(getattr(dtype, "torch", dtype)))

    def reshape(self, *shape: Any) -> Block:
        """Row-major."""
        return Block(self.data.reshape(*shape))

    def permute(self, order: Sequence[int]) -> Block:
        """Dimensions in another order."""
        return Block(self.data.permute(*order))

    def split(self) -> tuple[Block, Block]:
        """Halves of a last dimension of two."""
        assert self.shape[-1] == 2, f"split of {self.shape}"
        return Block(self.data[..., 0]), Block(self.data[..., 1])

    def __getitem__(self, item: Any) -> Block:
        return Block(self.data[item])

    def __index__(self) -> int:
        assert not self.data.is_floating_point(), "a float where an integer is wanted"
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Block:
        return Block(-self.data)

    def __invert__(self) -> Block:
        return Block(~self.data)

    __hash__ = object.__hash__


@functools.cache
def _dtype(kind: torch.dtype) -> Any:
    return SimpleNamespace(torch=kind, is_floating=lambda: kind.is_floating_point)


def operands(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values in the type that Triton computes with: Python's numbers take the other's."""
    if isinstance(a, Block) and isinstance(b, Block):
        first, second = a.data, b.data
        if first.dtype is not second.dtype:
            dtype = torch.promote_types(first.dtype, second.dtype)
            first, second = first.to(dtype), second.to(dtype)
        return first, second
    if isinstance(b, Block):
        data, number = operands(b, a)
        return number, data
    data = a.data
    if data.dtype == torch.bool and not isinstance(b, bool):
        data = data.to(torch.int32)
    if isinstance(b, float) and not data.is_floating_point():
        data = data.to(torch.float32)
    return data, b


def elementwise(a: Any, b: Any, function: _Tensors) -> Block:
    """A function of two values, one of them a block."""
    first, second = operands(a, b)
    return Block(function(first, second))


def _divide(a: Any, b: Any) -> torch.Tensor:
    """In float32, of integers too."""
    a, b = (x.float() if isinstance(x, torch.Tensor) else x for x in (a, b))
    return a / b


_OPERATORS: dict[str, _Tensors] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": _divide,
    # Integers round towards zero.
    "floordiv": lambda a, b: torch.div(_tensor(a), b, rounding_mode="trunc"),
    "mod": lambda a, b: torch.fmod(_tensor(a), b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: a << b,
    "rshift": lambda a, b: a >> b,
}
_COMPARISONS: dict[str, _Tensors] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.int32)


_OPERANDS = (Block, int, float)


def _method(function: _Tensors, *, turned: bool = False) -> Callable[[Block, Any], Any]:
    def method(self: Block, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return elementwise(other, self, function) if turned else elementwise(self, other, function)

    return method


for _name, _function in _OPERATORS.items():
    setattr(Block, f"__{_name}__", _method(_function))
    setattr(Block, f"__r{_name}__", _method(_function, turned=True))
for _name, _function in _COMPARISONS.items():
    setattr(Block, f"__{_name}__", _method(_function))


def of(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A value as a tensor: Python's numbers are int32 or float32."""
    if isinstance(x, Block):
        return x.data if dtype is None else x.data.to(dtype)
    kind = {bool: torch.bool, int: torch.int32, float: torch.float32}[type(x)]
    return torch.tensor(x, dtype=dtype or kind)


def arange(start: int, end: int, layout: Layout | None = None) -> Block:
    """int32 of a power of two."""
    assert math.log2(end - start).is_integer(), f"{end - start} is no power of two"
    return Block(torch.arange(start, end, dtype=torch.int32))


def full(
    shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Layout | None = None
) -> Block:
    """One value everywhere."""
    return Block(of(value, dtype).expand(list(shape)))


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Layout | None = None) -> Block:
    """Zeros."""
    return Block(torch.zeros(list(shape), dtype=dtype))


def zeros_like(x: Block) -> Block:
    """Zeros of the same shape and type."""
    return Block(torch.zeros_like(x.data))


def where(condition: Any, a: Any, b: Any) -> Block:
    """One or the other; both are computed."""
    if isinstance(a, Block) or isinstance(b, Block):
        a, b = operands(a, b)
        dtype = next(x.dtype for x in (a, b) if isinstance(x, torch.Tensor))
    else:
        dtype = torch.promote_types(of(a).dtype, of(b).dtype)
        a, b = of(a), of(b)
    a, b = (torch.as_tensor(x, dtype=dtype) for x in (a, b))
    return Block(torch.where(of(condition, torch.bool), a, b))


def maximum(a: Any, b: Any) -> Block:
    """The larger one; of a NaN and a number, the number."""
    return elementwise(a, b, lambda x, y: torch.fmax(torch.as_tensor(x), torch.as_tensor(y)))


def minimum(a: Any, b: Any) -> Block:
    """The smaller one, likewise."""
    return elementwise(a, b, lambda x, y: torch.fmin(torch.as_tensor(x), torch.as_tensor(y)))


def largest(x: Block, axis: int) -> Block:
    """Along a dimension, which goes; NaN counts for nothing, as in the hardware's maximum."""
    found = x.data.amax(axis)
    if found.is_floating_point() and found.isnan().any():
        found = x.data.nan_to_num(-math.inf, math.inf, -math.inf).amax(axis)
    return Block(found)


def smallest(x: Block, axis: int) -> Block:
    """The same, as its minimum."""
    if x.data.dtype == torch.bool:
        return ~largest(~x, axis)
    return -largest(-x, axis)


def total(x: Block, axis: int) -> Block:
    """The sum along a dimension."""
    return Block(x.data.sum(axis, dtype=x.data.dtype))


def join(a: Block, b: Block) -> Block:
    """Two as a new last dimension."""
    return Block(torch.stack([a.data, b.data], -1))


def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up; neither is negative."""
    return (a + b - 1) // b


def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Block]:
    """A function of float32 or of what it is given."""
    return lambda x: Block(function(of(x)))
