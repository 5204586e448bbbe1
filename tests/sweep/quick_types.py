"""Types and tensors of Triton's interpreter, made once for each element and shape."""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_made: dict[Any, Any] = {}
_blocks: dict[Any, Any] = {}


def intern_types() -> None:
    """A block type is the same object whenever it is asked for; so is what tensors have of it."""
    kind, tensor = tl.block_type, tl.tensor
    make, fill, compare = kind.__init__, tensor.__init__, tl.tuple.__eq__

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        element = (element_ty.name, element_ty.address_space) if element_ty.is_ptr() else element_ty
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        key = (id(element) if element is element_ty else element, *map(_size, sizes))
        if key not in _made:
            _made[key] = object.__new__(cls)
        return _made[key]

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in self.__dict__:  # which comes last, after all checks
            make(self, element_ty, shape)

    def of_handle(self: Any, handle: Any, type: Any) -> None:
        if (known := type.__dict__.get("of_tensors")) is None:
            fill(self, handle, type)
            type.of_tensors = (self.shape, self.numel, self.dtype)
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known

    # A launch asks anew for the types of its arguments.
    tl.str_to_ty = functools.cache(tl.str_to_ty)
    kind.__new__, kind.__init__ = new, init
    tensor.__init__ = of_handle
    tl.tuple.__eq__ = lambda a, b: tl.constexpr(True) if a is b else compare(a, b)


def _size(size: Any) -> Any:
    return size.value if isinstance(size, tl.constexpr) else size


def block_of(dtype: Any, shape: tuple[int, ...]) -> Any:
    """The type of a block."""
    key = (id(dtype), shape)
    if (known := _blocks.get(key)) is None or known.element_ty is not dtype:
        known = _blocks[key] = tl.block_type(dtype, list(shape))
    return known


def tensor_of(data: Any, dtype: Any, type: Any) -> Any:
    """A tensor of a kernel: what numpy holds, its element and its type."""
    tensor, handle = _new(tl.tensor), _new(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.__init__(handle, type)
    return tensor


_new = object.__new__
