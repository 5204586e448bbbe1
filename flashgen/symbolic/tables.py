"""RowTable: where the keys that match a row begin or end, looked up once a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.params import Tensor


@dataclass(frozen=True)
class RowTable:
    """An int32 tensor of the shape of `values`, for use as ``Load(table.sym, lead..., i)``.

    Its element for an entry x of ``values[lead..., i]`` is the first position j of
    ``keys[lead..., :]`` with ``keys[lead..., j] >= x`` (`side` "left") or ``> x`` (`side` "right"):
    ``torch.searchsorted(keys, values, right=side == "right")``. If there is none, it is the size
    of the last dimension of `keys`.

    If ids are only compared for equality, any order in which each id forms one run would do. A
    `cyclic` table accepts the orders that can be recognised at no cost: ids ascend from the first
    id on, past the largest int32 to the smallest, and stay below the first. So padding may be 0 or
    -1 behind larger ids.

    With a `hidden` id, rows of that id see no key: for them "left" and "right" are exchanged. Then
    no key lies at or after the begin and before the end, and rows still ascend. Where a mask shows
    what lies outside, as ``~document()`` does, rows of a hidden id see all keys: nothing is then
    taken for granted that holds for rows of other ids alone.

    For a tensor with ids in another order no table is right. A further table (`side` "unordered")
    marks such tensors: 1 or 0 for each index of the leading dimensions, with a last dimension of 1.
    Where it is 1, kernels read no other table: see `Promise`.

    Attributes:
        name: the name of its variable, which no parameter has.
        keys: the tensor that is searched: sorted along its last dimension.
        values: the tensor that is looked up.
        side: ``"left"``, ``"right"`` or ``"unordered"``.
        cyclic: whether ids may start over at the smallest int32, below the first.
        hidden: an id whose rows match no key; None for none.
        outside: whether a mask shows keys outside of the match, and rows of the hidden id see any.
    """

    name: str
    keys: Tensor
    values: Tensor
    side: str
    cyclic: bool = False
    hidden: int | None = None
    outside: bool = False

    @property
    def sym(self) -> Any:
        """The symbol that stands for the table in a `Load`."""
        return sympy.Symbol(self.name, integer=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The two declared tensors that the table is made from: `keys` and `values`."""
        return self.keys, self.values

    @property
    def most(self) -> Any | None:
        """The greatest possible element, as a sympy expression; None if unknown."""
        return last_size(self.keys)

    @property
    def search(self) -> tuple[str, str, bool, int | None]:
        """The search that makes the table: one kernel makes all tables of a search."""
        return self.keys.name, self.values.name, self.cyclic, self.hidden

    @property
    def of_itself(self) -> bool:
        """Whether a tensor is looked up in itself, and position i lies within its own match."""
        return self.keys.name == self.values.name and not self.outside


#: The least and the greatest int32.
LEAST, MOST = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class RangeTable:
    """An int32 tensor of the leading dimensions of a tensor, and 4: which keys are shown.

    A key is shown if its element of ``keys`` lies between two numbers. The elements of the last
    dimension are the first such key, the end of the last one, and the begin and end of a run of
    such keys: of the two at the range's ends, the longer one. If no key is shown, the ends are 0
    and the begins the number of keys.

    Attributes:
        name: the name of its variable, which no parameter has.
        keys: the tensor, whose last dimension counts keys.
        low, high: the least and the greatest element of a key that is shown.
        but: whether those are shown instead whose elements do not lie between them.
    """

    name: str
    keys: Tensor
    low: int
    high: int
    but: bool

    @property
    def sym(self) -> Any:
        """The symbol that stands for the table in a `Load`."""
        return sympy.Symbol(self.name, integer=True)

    @property
    def values(self) -> Tensor:
        """The tensor, whose number of dimensions the table has."""
        return self.keys

    @property
    def tensors(self) -> tuple[Tensor]:
        """The declared tensor that it is made from."""
        return (self.keys,)

    @property
    def most(self) -> Any | None:
        """The greatest possible element, as a sympy expression; None if unknown."""
        return last_size(self.keys)


#: Each condition on a position alone with the elements of its range table.
Ranges = dict[Any, tuple[Any, Any, Any, Any]]


def last_size(tensor: Tensor) -> Any | None:
    """The size of the last dimension as a sympy expression, None for any size."""
    size = tensor.dims[-1]
    return None if size is None else size.sym
