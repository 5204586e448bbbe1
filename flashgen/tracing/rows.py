"""Row: a declared tensor with fewer indices than dimensions, as in ``ids[b]`` of ``ids[b][q]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from flashgen.tracing.user_code import mistake

#: What a dimension is indexed by in an example.
_INDICES = {
    "batch": "b", "num_q_heads": "h", "num_kv_heads": "h", "q_len": "q_idx", "kv_len": "kv_idx",
}  # fmt: skip


class Row:
    """Waits for the indices that are missing; anything else that is done with it is a mistake.

    Args:
        tensor: the declared `Tensor`.
        indices: those that there are.
    """

    __slots__ = ("indices", "tensor")

    __array_ufunc__ = None

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

    def unfinished(self, remedy: str = "") -> Exception:
        """The mistake of taking it for a number."""
        name, dims = self.tensor.name, len(self.tensor.dims)
        given = f"{len(self.indices)} {'index' if len(self.indices) == 1 else 'indices'}"
        example = ", ".join(_INDICES.get(of, "i") for of in self.tensor.names)
        return mistake(
            f"{self} is a part of {name}, which has {dims} dimensions and was given {given}",
            remedy or f"give one for each, as in {name}[{example}]",
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self} is a part of a declared tensor and has no `{name}`: index it")

    def __str__(self) -> str:
        return f"`{self.tensor.name}[{', '.join(map(str, self.indices))}]`"

    __repr__ = __str__

    def __bool__(self) -> NoReturn:
        raise self.unfinished()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """torch.dot and the like, of which there is nothing to trace."""
        row = next(arg for arg in args if isinstance(arg, Row))
        raise row.unfinished(_sum_instead(getattr(func, "__name__", str(func))))

    def __matmul__(self, other: Any) -> NoReturn:
        raise self.unfinished(_sum_instead("matmul"))

    __rmatmul__ = __matmul__


def _sum_instead(name: str) -> str:
    return f"instead of torch's `{name}` write a sum, as x[i, 0] * y[j, 0] + x[i, 1] * y[j, 1]"


def _refused(self: Row, *others: Any) -> NoReturn:
    raise self.unfinished()


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
)
for _name in _OPERATORS:
    setattr(Row, f"__{_name}__", _refused)
    setattr(Row, f"__r{_name}__", _refused)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(Row, f"__{_name}__", _refused)


def index_tuple(index: Any) -> tuple[Any, ...]:
    """The indices in brackets, without each ``:`` and ``...`` that stands for what follows."""
    indices = index if isinstance(index, tuple) else (index,)
    while indices and (indices[-1] is Ellipsis or _is_whole(indices[-1])):
        indices = indices[:-1]
    return indices


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and (index.start, index.stop, index.step) == (None, None, None)


def indexed(tensor: Any, index: Any, element: Callable[[tuple[Any, ...]], Any]) -> Any:
    """``tensor[index]``: a `Row` where indices are missing, else ``element(indices)``.

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
