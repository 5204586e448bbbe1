"""Row: a declared tensor with fewer indices than dimensions, as in ``ids[b]`` of ``ids[b][q]``.

If the last dimension has few elements, a row is a vector, and functions of it give a `Vector`:
``(chosen[b, q_idx // 128] == kv_idx // 128).any()`` is one comparison an element, joined by ``|``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from flashgen.tracing.user_code import mistake, name_of, untraceable

#: The index of each dimension in an example.
_INDICES = {
    "batch": "b", "num_q_heads": "h", "num_kv_heads": "h", "q_len": "q_idx", "kv_len": "kv_idx",
}  # fmt: skip

#: The most elements that a kernel computes one by one.
MOST_ELEMENTS = 16

_SUMS_OF_PRODUCTS = frozenset(("dot", "inner", "vdot", "matmul", "__matmul__"))
_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "any": operator.or_, "all": operator.and_, "sum": operator.add,
}  # fmt: skip
#: The methods for which a row would have to be a tensor.
_NOT_OF_ELEMENTS = frozenset(("shape", "size", "ndim", "dim", "numel", "dtype", "device", "item"))


class Elementwise:
    """A value to whose elements operators and torch's functions apply one by one."""

    __slots__ = ()

    __array_ufunc__ = None

    @property
    def elements(self) -> tuple[Any, ...]:
        """The numbers or conditions of the value."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch.dot and the like sum products of elements; other functions act on each."""
        name = name_of(func)
        named = dict(kwargs or {})
        if name in _SUMS_OF_PRODUCTS and len(args) == 2 and not named:
            return _sum_of_products(name, *args)
        if name == "isin" and len(args) == 2 and not named and isinstance(args[1], Elementwise):
            return (args[1] == args[0]).any()
        if name in _JOINED and isinstance(args[0], Elementwise):
            return getattr(args[0], name)(*args[1:], **named)
        if not any(isinstance(arg, Elementwise) for arg in args):
            raise untraceable(name, args)
        return elementwise(lambda *each: func(*each, **named), *args)

    def any(self, dim: Any = -1) -> Any:
        """Whether one of the conditions holds."""
        return self._joined("any", dim)

    def all(self, dim: Any = -1) -> Any:
        """Whether all of them do."""
        return self._joined("all", dim)

    def sum(self, dim: Any = -1) -> Any:
        """The sum of the numbers."""
        return self._joined("sum", dim)

    def _joined(self, name: str, dim: Any) -> Any:
        if dim not in (-1, 0, None):
            raise mistake(
                f"{self} is given to `{name}` along dimension {dim!r}",
                f"write .{name}(): what is indexed has one dimension left",
            )
        # A sum is of 64 bits in torch, also of elements of 8 bits.
        return functools.reduce(_JOINED[name], [getattr(x, "wide", x) for x in self.elements])

    def __matmul__(self, other: Any) -> Any:
        return _sum_of_products("matmul", self, other)

    def check_taken(self, function: str) -> None:
        """Raises MaskError if a function of all elements cannot take this value."""

    def unfinished(self, function: str = "") -> Exception:
        """The mistake of taking it for a number."""
        return mistake(
            f"{self} are {len(self.elements)} values and stand for one",
            "join them by .any(), .all() or .sum()",
        )

    def __bool__(self) -> NoReturn:
        raise self.unfinished()

    __hash__ = None  # type: ignore[assignment]


class Vector(Elementwise):
    """Numbers or conditions: results of functions of the elements of a `Row`.

    Args:
        elements: symbolic values, one for each column.
    """

    __slots__ = ("_elements",)

    def __init__(self, elements: Iterable[Any]) -> None:
        self._elements = tuple(elements)

    @property
    def elements(self) -> tuple[Any, ...]:
        """The elements, one for each column."""
        return self._elements

    def __getitem__(self, index: int) -> Any:
        return self._elements[index]

    def __getattr__(self, name: str) -> Any:
        """A tensor's methods, as in ``(ids[b] - q_idx).abs()``."""
        if name.startswith("_"):
            raise AttributeError(name)
        methods = [getattr(element, name) for element in self._elements]
        return lambda *args, **named: elementwise(
            lambda i, *each: methods[i](*each, **named), Vector(range(len(methods))), *args
        )

    def __str__(self) -> str:
        return f"`{', '.join(map(str, self._elements))}`"

    __repr__ = __str__


class Row(Elementwise):
    """A tensor with missing indices, or the elements of a short last dimension.

    Args:
        tensor: the declared `Tensor`.
        indices: the given indices.
    """

    __slots__ = ("indices", "tensor")

    def __init__(self, tensor: Any, indices: tuple[Any, ...]) -> None:
        self.tensor, self.indices = tensor, indices

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[(*self.indices, *index_tuple(index))]

    def __iter__(self) -> Iterator[Any]:
        """The elements of a last dimension whose size is a number: ``begin, end = spans[b]``."""
        size = self.tensor.dims[len(self.indices)]
        if size is None or not size.sym.is_Integer:
            raise self.unfinished()
        return (self[i] for i in range(int(size.sym)))

    @property
    def elements(self) -> tuple[Any, ...]:
        """The elements of a short last dimension; kernels compute them one by one."""
        self.check_taken("")
        size = self.tensor.dims[-1]
        return tuple(self[i] for i in range(int(size.sym)))

    def check_taken(self, function: str) -> None:
        """Raises MaskError if the row is not known to have few elements."""
        size = self.tensor.dims[-1]
        one_left = len(self.indices) == len(self.tensor.dims) - 1
        if not one_left or size is None or not size.sym.is_Integer:
            raise self.unfinished(function)
        if size.sym > MOST_ELEMENTS:
            raise mistake(
                f"{self} has {size} elements, and a kernel computes each by itself",
                f"index one, or declare a last dimension of {MOST_ELEMENTS} at most",
            )

    def unfinished(self, function: str = "") -> Exception:
        """The mistake of taking it for a number."""
        name, dims = self.tensor.name, len(self.tensor.dims)
        given = f"{len(self.indices)} {'index' if len(self.indices) == 1 else 'indices'}"
        example = ", ".join(_INDICES.get(of, "i") for of in self.tensor.names)
        remedy = f"give one for each, as in {name}[{example}]"
        if function:
            remedy = (
                f"instead of torch's `{function}` write a sum, as x[i, 0] * y[j, 0] + x[i, 1] * "
                f"y[j, 1], or declare a last dimension of {MOST_ELEMENTS} at most"
            )
            if function in ("dot", "matmul", "inner", "__matmul__"):
                remedy += "; or append both to q and k, whose products scores are"
        return mistake(
            f"{self} is a part of {name}, which has {dims} dimensions and was given {given}", remedy
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _NOT_OF_ELEMENTS:
            raise AttributeError(
                f"{self} is a part of a declared tensor and has no `{name}`: index it"
            )
        return getattr(Vector(self.elements), name)

    def __str__(self) -> str:
        indices = f"[{', '.join(map(str, self.indices))}]" if self.indices else ""
        return f"`{self.tensor.name}{indices}`"

    __repr__ = __str__


def elementwise(function: Callable[..., Any], *operands: Any) -> Vector:
    """The function's results for the first elements of its operands, the second ones, and so on.

    An operand without elements is the same for all. Raises MaskError if numbers of elements differ.
    """
    parts = [x.elements if isinstance(x, Elementwise) else None for x in operands]
    sizes = list(dict.fromkeys(len(part) for part in parts if part is not None))
    if len(sizes) > 1:
        shown = " and ".join(str(x) for x in operands if isinstance(x, Elementwise))
        raise mistake(f"{shown} have {' and '.join(map(str, sizes))} elements", "give both as many")
    return Vector(
        function(*(x if part is None else part[i] for x, part in zip(operands, parts, strict=True)))
        for i in range(sizes[0])
    )


def _sum_of_products(name: str, a: Any, b: Any) -> Any:
    for side, other in ((a, b), (b, a)):
        if isinstance(side, Elementwise):
            side.check_taken(name)
            if not isinstance(other, Elementwise):
                raise side.unfinished(name)
    return (a * b).sum()


def _operator(function: Callable[..., Any]) -> Any:
    return lambda self, *others: elementwise(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Any:
    return lambda self, other: elementwise(function, other, self)


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow",
    "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
for _name in _OPERATORS:
    _function = getattr(operator, f"__{_name}__")
    setattr(Elementwise, f"__{_name}__", _operator(_function))
    setattr(Elementwise, f"__r{_name}__", _reflected(_function))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(Elementwise, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))


def index_tuple(index: Any) -> tuple[Any, ...]:
    """The indices in brackets, without ``:`` and ``...`` for the dimensions that follow."""
    indices = index if isinstance(index, tuple) else (index,)
    while indices and (indices[-1] is Ellipsis or _is_whole(indices[-1])):
        indices = indices[:-1]
    return indices


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and (index.start, index.stop, index.step) == (None, None, None)


def indexed(tensor: Any, index: Any, element: Callable[[tuple[Any, ...]], Any]) -> Any:
    """``tensor[index]``: a `Row` if indices are missing, else ``element(indices)``.

    Raises:
        MaskError: there are more indices than dimensions.
    """
    indices = index_tuple(index)
    if any(i is None or i is Ellipsis or isinstance(i, slice) for i in indices):
        raise mistake(
            f"{tensor.name} is indexed by a range, or by `None`",
            "give one position for each dimension",
        )
    if len(indices) < len(tensor.dims):
        return Row(tensor, indices)
    if len(indices) > len(tensor.dims):
        raise mistake(
            f"{tensor.name} has {len(tensor.dims)} dimensions and was given {len(indices)} indices",
            "give one for each",
        )
    return element(indices)
