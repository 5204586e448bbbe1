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
    ``torch.searchsorted(keys, values, right=side == "right")``. It is the size of the last
    dimension of `keys` where there is none.

    If ids are only compared for equality, any order in which each id is one run would do. A
    `cyclic` table accepts the orders that can be recognised at no cost: ids ascend from the first
    one on, past the largest int32 to the smallest. So padding may be 0 or -1 behind larger ids.

    With a `hidden` id, rows of that id see no key: "left" and "right" are exchanged for them. No
    key is at or after the one and before the other, and rows still ascend.

    For a tensor with ids in another order no table is right. A further table (`side` "unordered")
    says whether that is so: 1 or 0 for each of the leading dimensions, with a last dimension of 1.
    Where it is 1, kernels read no other table: see `Promise`.

    Attributes:
        name: the name of its variable, which no parameter has.
        keys: the tensor that is searched: sorted along its last dimension.
        values: the tensor that is looked up.
        side: ``"left"``, ``"right"`` or ``"unordered"``.
        cyclic: whether ids may go on at the smallest, up to the first.
        hidden: an id whose rows match no key; None for none.
    """

    name: str
    keys: Tensor
    values: Tensor
    side: str
    cyclic: bool = False
    hidden: int | None = None

    @property
    def sym(self) -> Any:
        """The symbol that stands for it in a `Load`."""
        return sympy.Symbol(self.name, integer=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The two declared tensors that the table is made from, of keys and of values."""
        return self.keys, self.values

    @property
    def most(self) -> Any | None:
        """The greatest element there can be, as a sympy expression; None where unknown."""
        return last_size(self.keys)

    @property
    def search(self) -> tuple[str, str, bool, int | None]:
        """The search that makes the table: those of one search are made by one kernel."""
        return self.keys.name, self.values.name, self.cyclic, self.hidden

    @property
    def of_itself(self) -> bool:
        """Whether a tensor is looked up in itself: then position i lies where its match does."""
        return self.keys.name == self.values.name


def last_size(tensor: Tensor) -> Any | None:
    """The size of the last dimension as a sympy expression, None where any will do."""
    size = tensor.dims[-1]
    return None if size is None else size.sym
