"""Typical values of run-time parameters, for ranking and measuring candidates.

A number has its default, if it has one. The contents of tensors are assumptions: sorted tensors,
and those whose elements of a query and of a key are compared for equality, are the ids of packed
documents, other integers are `TYPICAL`, conditions hold for a quarter of the
elements, and fractions are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.dropout import TYPICAL_P, DropoutP, Seed
from flashgen.params import Float, Int, Tensor
from flashgen.symbols import KV_IDX, Q_IDX, Load

#: Parameters without a default have this value, or their minimum if that is larger.
TYPICAL = 1024

#: Tokens of a packed document.
DOCUMENT = 1000

#: Blocks of a list of them.
CHOSEN = 16

#: The share of a boolean tensor's elements that hold.
SHARE = 0.25


def typical_number(param: Param) -> int | float:
    """The value of a number, or of a seed."""
    if isinstance(param, DropoutP):
        return TYPICAL_P
    if isinstance(param, Seed):
        return 0
    if param.default is not None:
        return param.default
    if isinstance(param, Int):
        return max(TYPICAL, param.min)
    assert isinstance(param, Float), param
    return 1.0 if param.above is None else param.above + 1.0


def ids_of(expr: Any) -> frozenset[str]:
    """The names of tensors whose elements of a query and of a key a mask's condition compares."""
    pairs = [(x.lhs, x.rhs) for x in expr.atoms(sympy.Eq, sympy.Ne)]
    return frozenset(
        load.args[0].name
        for pair in pairs
        if all(isinstance(side, Load) for side in pair)
        if {side.args[-1] for side in pair} == {Q_IDX, KV_IDX}
        for load in pair
    )


@dataclass(frozen=True)
class TypicalTensor:
    """Stands in for a tensor where bounds are evaluated without torch: indices give elements.

    Attributes:
        tensor: its declaration.
        ids: whether its elements are the ids of documents.
    """

    tensor: Tensor
    ids: bool = False

    def __getitem__(self, index: tuple[int, ...]) -> int | float:
        if self.tensor.sorted or self.ids:
            return max(0, index[-1]) // DOCUMENT
        if self.tensor.dtype == "int32":
            return TYPICAL
        return 0


@dataclass(frozen=True)
class TypicalRowTable:
    """Stands in for a `RowTable` of such ids: where the document of an entry begins, or ends.

    A table of side "unordered" holds 0: the ids are in order.
    """

    side: str

    def __getitem__(self, index: tuple[int, ...]) -> int:
        document = max(0, index[-1]) // DOCUMENT
        if self.side == "unordered":
            return 0
        return DOCUMENT * (document + (self.side == "right"))


@dataclass(frozen=True)
class TypicalRangeTable:
    """Stands in for a `RangeTable` of a condition that the first and the last key meet.

    Attributes:
        length: how many keys there are.
        whole: whether all keys meet it.
    """

    length: int
    whole: bool

    def __getitem__(self, index: tuple[int, ...]) -> int:
        return (0, self.length, 0, self.length * self.whole)[index[-1]]
