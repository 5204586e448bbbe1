"""CapturedTensor: a tensor that a function captures, as a parameter that it indexes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from flashgen.integrations.small_integer import SMALL, SmallInteger
from flashgen.params import Int, Tensor
from flashgen.symbols import (
    BATCH,
    KV_HEADS,
    KV_IDX,
    KV_LEN,
    Q_HEADS,
    Q_IDX,
    Q_LEN,
    B,
    FloorDiv,
    FloorMod,
    H,
    Load,
)
from flashgen.tracing.expr import Expr, apply
from flashgen.tracing.rows import MOST_ELEMENTS, Row
from flashgen.tracing.signs import LEAST, at_least
from flashgen.tracing.user_code import mistake

#: The dtype of the parameter for a tensor of each dtype.
PARAMETER_DTYPES = {
    torch.bool: torch.bool,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int32),
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)},
    torch.float64: torch.float32,
}

#: The position that each symbol counts to.
_ENDS = {B: BATCH, H: Q_HEADS, Q_IDX: Q_LEN, KV_IDX: KV_LEN}

#: Sizes of a call, by their symbols.
Sizes = Mapping[Any, int]


class CapturedTensor(Tensor):
    """A declared `Tensor` that stands for a tensor, whose attributes and functions it has.

    As in torch, a negative index counts from the end.

    Args:
        name: of the parameter.
        real: the tensor.
        dims: as `Tensor` takes them.
        sizes: of the call.
        sorted: as `Tensor` takes it.
        is_number: whether it stands for a tensor without dimensions.
        make: what makes the tensor of a call from the one that is captured; None: it is that one.
    """

    __slots__ = ("derived", "exact", "is_number", "make", "nonnegative", "real", "sizes")

    def __init__(
        self,
        name: str,
        real: torch.Tensor,
        dims: tuple[str | int | None, ...],
        sizes: Sizes,
        *,
        sorted: bool = False,
        is_number: bool = False,
        make: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        dtype: Any = PARAMETER_DTYPES[real.dtype]
        super().__init__(name, dims, dtype, sorted=sorted)
        self.real, self.sizes, self.is_number, self.make = real, sizes, is_number, make
        #: Whether its sizes were read, so that the trace holds for these alone.
        self.exact = False
        #: Indices that are not negative for the lengths of this call, and may be for others.
        self.nonnegative: list[Any] = []
        #: Tensors that the function makes of this one before it indexes them, by how.
        self.derived: dict[Any, CapturedTensor] = {}

    def forget(self) -> None:
        """Lets the tensor go, and those made of it: what was traced is kept for longer."""
        self.real = self.real.to("meta")
        for made in self.derived.values():
            made.forget()

    def _element(self, indices: tuple[Any, ...]) -> Any:
        found = super()._element(tuple(self._from_start(i, at) for at, i in enumerate(indices)))
        if self.real.dtype not in SMALL:
            return found
        return SmallInteger(found.sym, found.params, self.real.dtype)

    def _from_start(self, index: Any, at: int) -> Any:
        """An index that counts from the start."""
        index = apply("+", index, 0)
        if index.sym.is_Integer and index.sym < 0:
            self.exact = True
            return index + self.real.shape[at]
        least = dict(LEAST) | {p.sym: p.min for p in index.params if isinstance(p, Int)}
        if index.kind != "integer" or at_least(index.sym, 0, least):
            return index
        if not index.sym.has(Load) and lowest(index.sym, self.sizes) >= 0:
            self.nonnegative.append(index.sym)
            return index
        size: Any = self.dims[at]
        if size is None:
            self.exact, size = True, self.real.shape[at]
        return index + ((index >> 31) & size)  # without a condition, whose cases bounds would split

    @property
    def shape(self) -> torch.Size:
        """The tensor's sizes."""
        self.exact = True
        return self.real.shape

    def size(self, dim: int | None = None) -> Any:
        """The tensor's sizes, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The number of its elements."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """The number of its dimensions."""
        return self.real.dim()

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self.real.dim()

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self.real.device

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        whole = all(isinstance(i, slice | int | type(None) | type(...)) for i in indices)
        if whole and any(isinstance(i, slice) and i != slice(None) for i in indices):
            return self._made(lambda x: x[index], ("[]", str(index)))
        return super().__getitem__(index)

    def __getattr__(self, name: str) -> Any:
        """A method of a tensor, whose result is made anew at each call."""
        method = getattr(torch.Tensor, name, None)
        if name.startswith("_") or name.endswith("_") or not callable(method):
            return super().__getattr__(name)
        if name in ("any", "all", "sum", "dot") and self.real.dim() == 1:
            return getattr(Row(self, ()), name)

        def called(*arguments: Any, **options: Any) -> Any:
            if name in ("to", "type_as", "expand_as"):
                arguments = tuple(getattr(x, "real", x) for x in arguments)
            if any(isinstance(x, Expr | Tensor) for x in (*arguments, *options.values())):
                return getattr(Row(self, ()), name)(*arguments, **options)
            how = (name, str(arguments), str(options))
            return self._made(lambda x: getattr(x, name)(*arguments, **options), how)

        return called

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A function of the whole tensor, if it is the only one among the arguments."""
        options = kwargs or {}
        owners = [x for x in args if isinstance(x, Tensor | Expr | Row)]
        if len(owners) == 1 and isinstance(owners[0], CapturedTensor):
            at = next(i for i, x in enumerate(args) if x is owners[0])
            how = (func, str(args), str(options))
            return owners[0]._made(lambda x: func(*args[:at], x, *args[at + 1 :], **options), how)
        rows = [Row(x, ()) if isinstance(x, Tensor) else x for x in args]
        return Row.__torch_function__(func, types, tuple(rows), options)

    def _made(self, function: Callable[[torch.Tensor], Any], how: Any) -> Any:
        """What a function makes of the tensor: again a captured one, or a number of it."""
        if how in self.derived:
            return self.derived[how]
        before = self.make
        result = function(self.real)
        if not isinstance(result, torch.Tensor):
            raise mistake(
                f"a {type(result).__name__} is taken out of {self.name}, and may change",
                "index the tensor instead, or take it out before, outside of the function",
            )
        if result.dim() == 0:
            one: CapturedTensor = self._made(lambda x: function(x).reshape(1), ("one", how))
            return one[0]
        if result.dtype not in PARAMETER_DTYPES or result.dim() > 4:
            raise mistake(
                f"{self.name} becomes a tensor of {result.dim()} dimensions of {result.dtype}",
                "make what is indexed outside of the function",
            )
        self.exact = True
        made = CapturedTensor(
            f"{self.name}_{len(self.derived)}",
            result.detach(),
            first_dims(result),
            self.sizes,
            make=function if before is None else lambda x: function(before(x)),
        )
        self.derived[how] = made
        return made


def _on_rows(name: str) -> Any:
    """An operator of a whole tensor: of its elements where they are few, else of the tensor."""

    def operator(self: CapturedTensor, *others: Any) -> Any:
        if any(isinstance(x, Expr | Tensor | Row) for x in others):
            return getattr(Row(self, ()), name)(
                *(Row(x, ()) if isinstance(x, Tensor) else x for x in others)
            )
        return self._made(lambda x: getattr(x, name)(*others), (name, str(others)))

    return operator


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift",
):  # fmt: skip
    for _side in ("", "r"):
        setattr(CapturedTensor, f"__{_side}{_name}__", _on_rows(f"__{_side}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "matmul"):
    setattr(CapturedTensor, f"__{_name}__", _on_rows(f"__{_name}__"))
CapturedTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def first_dims(real: torch.Tensor) -> tuple[int | None, ...]:
    """The sizes of a tensor that has not been traced yet: a short last one may be a vector's."""
    *leading, last = real.shape
    return (*(None for _ in leading), last if 1 <= last <= MOST_ELEMENTS else None)


def named_dims(
    tensor: CapturedTensor, loads: list[Load], sizes: Sizes
) -> tuple[str | int | None, ...]:
    """The meaning of each dimension, by the indices of the loads and the sizes of the call."""
    found: list[str | int | None] = []
    for at, size in enumerate(tensor.real.shape):
        indices = {load.args[1 + at] for load in loads}
        ends = {_ENDS.get(index) for index in indices}
        fitting = [end for end in (KV_LEN, Q_LEN, Q_HEADS, BATCH) if end in ends]
        if indices and all(index.is_Integer for index in indices):
            found.append(size)
        elif None not in ends and fitting and sizes[fitting[0]] == size:
            found.append(str(fitting[0]))
        else:
            found.append(None)
    return tuple(found)


def resolved(dim: Expr, sizes: Sizes) -> int:
    """The number of a dimension with a name, or of a fixed one."""
    return int(dim.sym.xreplace(dict(sizes)))


def lowest(expr: Any, sizes: Sizes) -> float:
    """A number that an index is never below, for positions within these sizes."""
    return _range(expr, sizes)[0]


def _range(expr: Any, sizes: Sizes) -> tuple[float, float]:
    unknown = (-math.inf, math.inf)
    if expr.is_Number:
        return float(expr), float(expr)
    if expr in _ENDS:
        return 0, max(sizes[_ENDS[expr]] - 1, 0)
    if expr in sizes:
        return sizes[expr], sizes[expr]
    parts = [_range(arg, sizes) for arg in expr.args if not isinstance(expr, sympy.Piecewise)]
    if expr.is_Add:
        return sum(low for low, _ in parts), sum(high for _, high in parts)
    if expr.is_Mul:
        low, high = 1.0, 1.0
        for part in parts:
            products = [x * y for x in (low, high) for y in part]
            if any(map(math.isnan, products)):
                return unknown
            low, high = min(products), max(products)
        return low, high
    if isinstance(expr, sympy.Min):
        return min(low for low, _ in parts), min(high for _, high in parts)
    if isinstance(expr, sympy.Max):
        return max(low for low, _ in parts), max(high for _, high in parts)
    if isinstance(expr, sympy.Abs):
        low, high = parts[0]
        return max(low, -high, 0), max(-low, high)
    if isinstance(expr, FloorDiv) and parts[1][0] > 0:
        quotients = [x // y for x in parts[0] for y in parts[1] if math.isfinite(x)]
        return (min(quotients), max(quotients)) if len(quotients) == 4 else unknown
    if isinstance(expr, FloorMod) and parts[1][0] > 0:
        return 0, parts[1][1]
    return unknown


_SYMBOLS = (BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN)


def sizes_of(query: torch.Tensor, key: torch.Tensor) -> dict[Any, int]:
    """The sizes of a call, by their symbols."""
    batch, num_q_heads, q_len, _ = query.shape
    return dict(zip(_SYMBOLS, (batch, num_q_heads, key.shape[1], q_len, key.shape[2]), strict=True))
