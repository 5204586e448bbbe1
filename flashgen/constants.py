"""Constant: a tensor that is known when the module is built, and part of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import sympy

from flashgen.errors import MaskError
from flashgen.params import Int, Tensor
from flashgen.tracing.expr import Expr, concrete, is_bound, merged_params

if TYPE_CHECKING:
    import torch

#: The names that a dimension can have.
COUNTED = ("num_q_heads", "q_len", "kv_len")

#: A table of a million blocks is a megabyte of text.
MOST_ELEMENTS = 2**20

#: The greatest element of a dtype. The least is its negative, except for the first two dtypes.
_GREATEST = {
    "bool": 1, "int32": 2**31 - 1,
    "float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
}  # fmt: skip
_LEAST = {"bool": 0, "int32": -(2**31)}

#: A dimension of `Constant`: heads, positions, or blocks of this many positions.
Dimension = str | tuple[str, int | Int] | None


@dataclass(frozen=True)
class Elements:
    """Numbers in rows: indexed by a tuple, 0 outside, as a kernel reads them.

    Attributes:
        shape: the size of each dimension.
        flat: the elements in row-major order.
    """

    shape: tuple[int, ...]
    flat: tuple[bool | int | float, ...]

    def __getitem__(self, indices: tuple[int, ...]) -> bool | int | float:
        at = 0
        for index, size in zip(indices, self.shape, strict=True):
            if not 0 <= index < size:
                return 0
            at = at * size + index
        return self.flat[at]

    @property
    def rows(self) -> tuple[tuple[bool | int | float, ...], ...]:
        """The rows: the elements along the last dimension."""
        width = self.shape[-1]
        return tuple(self.flat[i : i + width] for i in range(0, len(self.flat), width))

    @cached_property
    def digest(self) -> str:
        """sha256 of sizes and elements."""
        return hashlib.sha256(repr((self.shape, self.flat)).encode()).hexdigest()


class Constant(Tensor):
    """A tensor that is known when the module is built: ``near[h, q_idx // 128]``, ``slopes[h]``.

    Mask and score functions index it like a `Tensor`. It is not an argument of ``attention``: the
    generated module holds its elements, and makes the tensor once for each device.

    Args:
        name: its name in the generated module.
        values: bools or numbers in nested sequences, for 1 to 4 dimensions, or a torch tensor or a
            numpy array; at most 2**20 elements.
        dtype: a dtype of a `Tensor`; None is ``"bool"``, ``"int32"`` or ``"float32"``, by the
            elements. With ``"bool"``, bools and numbers of 0 and 1 are conditions.
        dims: the meaning of each dimension, by which the generated ``attention`` refuses calls that
            the constant does not fit: ``"num_q_heads"``, exactly as many heads as entries;
            ``"q_len"`` or ``"kv_len"``, at most as many positions; ``("q_len", 128)``, one entry
            for each 128 positions, or for each block of an `Int` with min=1; None, unchecked. If
            left out, all are None.
        doc: one line for the generated module.

    An index is from 0 to the size less one, as for a `Tensor`. The build itself finds whether whole
    numbers never fall along the last dimension, as ``sorted=True`` promises for a `Tensor`.

    Raises:
        MaskError: the values or an argument are wrong; the message names it.
    """

    __slots__ = ("elements", "limits")

    def __init__(
        self,
        name: str,
        values: Any,
        dtype: str | None = None,
        *,
        dims: Sequence[Dimension] | None = None,
        doc: str = "",
    ) -> None:
        elements = elements_of(f"Constant({name!r}): values", values, dtype)
        dtype = dtype or _natural_dtype(elements)
        super().__init__(name, elements.shape, dtype, doc=doc)
        self.elements = elements
        self.sorted = dtype == "int32" and all(
            a <= b for row in self.elements.rows for a, b in pairwise(row)
        )
        dims = (None,) * len(elements.shape) if dims is None else dims
        if not isinstance(dims, tuple | list) or len(dims) != len(elements.shape):
            raise MaskError(
                f"Constant({name!r}): dims={dims!r}; give one for each of the sizes "
                f"{elements.shape}, in a tuple"
            )
        #: The checks of ``attention``: the name of a size of the call, and its allowed values.
        self.limits = tuple(
            _limit(name, dim, size)
            for dim, size in zip(dims, elements.shape, strict=True)
            if dim is not None
        )
        self._names = tuple(
            dim if isinstance(dim, str) else str(size)
            for dim, size in zip(dims, elements.shape, strict=True)
        )

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same constant."""
        limits = tuple((of, str(size.sym)) for of, size in self.limits)
        return ("Constant", self.name, self.dtype, limits, self.elements.digest)

    def but(self, dtype: str, dims: Sequence[Dimension]) -> Constant:
        """A constant with the same elements, another dtype and other `dims`."""
        return Constant(self.name, self.elements, dtype, dims=dims, doc=self.doc)

    def tensor(self, device: Any = None) -> torch.Tensor:
        """The elements as a torch tensor."""
        import torch

        flat = torch.tensor(self.elements.flat, dtype=getattr(torch, self.dtype), device=device)
        return flat.reshape(self.elements.shape)

    def _element(self, indices: tuple[Any, ...]) -> Any:
        if not is_bound():
            expr = super()._element(indices)
            return Expr(expr.sym, merged_params([expr, *(size for _, size in self.limits)]))
        indices = tuple(map(concrete, indices))
        device = next((i.device for i in indices if hasattr(i, "device")), None)
        if device is None:
            return self.elements[indices]
        import torch

        found = self.tensor(device)[indices]
        return found.to(torch.get_default_dtype()) if self.is_float else found

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.elements.shape))
        return f"Constant({self.name!r}, ({sizes}), {self.dtype!r}, {self.elements.digest[:8]})"


def elements_of(owner: str, values: Any, dtype: str | None = None) -> Elements:
    """Sequences of numbers, or a tensor or array, as `Elements`.

    Args:
        owner: the name of the values, for the error.
        values: as `Constant` takes them.
        dtype: the dtype of the elements, as `Constant` takes it.

    Raises:
        MaskError: the values have no dimension, are ragged, empty or too many, or do not fit the
            dtype.
    """
    size = math.prod(getattr(values, "shape", ()))
    if not isinstance(values, Elements) and size <= MOST_ELEMENTS:
        values = _nested(owner, values)
        size = len(values.flat)
    if size > MOST_ELEMENTS:
        raise MaskError(f"{owner} are over 2**20 elements; declare a Tensor, which the call passes")
    if not values.shape:
        raise MaskError(f"{owner} are {values.flat[0]!r}, which has no dimension; give a list")
    return _as_dtype(owner, values, dtype or _natural_dtype(values))


def _nested(owner: str, values: Any) -> Elements:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        if not isinstance(values, int) and not (
            isinstance(values, float) and math.isfinite(values)
        ):
            raise MaskError(f"{owner} hold {values!r}; give bools or finite numbers")
        return Elements((), (values,))
    parts = [_nested(owner, part) for part in values]
    if not parts:
        raise MaskError(f"{owner} are empty; give an element at least")
    shapes = list(dict.fromkeys(part.shape for part in parts))
    if len(shapes) > 1:
        raise MaskError(
            f"{owner} are ragged, with parts of the shapes {shapes[0]} and {shapes[1]}; "
            "give parts of one shape"
        )
    return Elements((len(parts), *shapes[0]), tuple(x for part in parts for x in part.flat))


def _natural_dtype(elements: Elements) -> str:
    if all(isinstance(x, bool) for x in elements.flat):
        return "bool"
    return "int32" if all(isinstance(x, int) for x in elements.flat) else "float32"


def _as_dtype(owner: str, elements: Elements, dtype: str) -> Elements:
    """The elements as bools, ints or floats.

    Raises:
        MaskError: an element does not fit the dtype.
    """
    kind = {"bool": bool, "int32": int}.get(dtype, float)
    most = _GREATEST.get(dtype, math.inf)
    least = _LEAST.get(dtype, -most)
    for x in elements.flat:
        if not least <= x <= most or (kind is not float and not isinstance(x, int)):
            accepted = {"bool": "True or False, 1 or 0", "int32": "whole numbers of 32 bits"}
            wanted = accepted.get(dtype, f"numbers of the range of {dtype}")
            raise MaskError(f"{owner} hold {x!r}; give {wanted}")
    return Elements(elements.shape, tuple(map(kind, elements.flat)))


def _limit(name: str, dim: Dimension, size: int) -> tuple[str, Expr]:
    """The name of a dimension of this size, and the number of heads or positions that it covers."""
    of, step = dim if isinstance(dim, tuple) and len(dim) == 2 else (dim, 1)
    steps = step.min if isinstance(step, Int) else step
    known = of in COUNTED and isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    if not known or (isinstance(dim, tuple) and of == "num_q_heads"):
        raise MaskError(
            f"Constant({name!r}): a dimension is {dim!r}; write one of {', '.join(COUNTED)}, "
            "('q_len', 128) for an entry each 128 positions, or None"
        )
    assert isinstance(of, str)
    return of, Expr(sympy.Integer(size)) * step
