"""The sign of an expression, and its direction along a position, by the declarations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.params import Int, Tensor
from flashgen.symbolic.tables import RangeTable, RowTable, last_size
from flashgen.symbolic.trace import is_of_tile
from flashgen.symbols import FloorDiv, Load
from flashgen.tracing.signs import LEAST, at_least


@dataclass(frozen=True, eq=False)
class Declarations:
    """The declarations of the symbols in a predicate.

    Attributes:
        least: the least value of each symbol that has one.
        tensors: the declared tensor of each tensor symbol.
        tables: the row table of each row table symbol.
        ranges: the range table of each range table symbol.
    """

    least: Mapping[Any, int] = field(default_factory=dict)
    tensors: Mapping[Any, Tensor] = field(default_factory=dict)
    tables: Mapping[Any, RowTable] = field(default_factory=dict)
    ranges: Mapping[Any, RangeTable] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        params: Iterable[Param],
        tables: Iterable[RowTable] = (),
        ranges: Iterable[RangeTable] = (),
    ) -> Declarations:
        """From declarations; lengths are positive, indices are not negative."""
        params = tuple(params)
        least = {**LEAST, **{param.sym: param.min for param in params if isinstance(param, Int)}}
        tensors = {param.sym: param for param in params if isinstance(param, Tensor)}
        by_symbol = {table.sym: table for table in tables}
        return cls(least, tensors, by_symbol, {table.sym: table for table in ranges})

    def at_least(self, expr: Any, bound: int) -> bool:
        """Whether ``expr >= bound``, for a bound of 0 or 1, by its form alone. False: unknown."""
        return at_least(expr, bound, self.least, self._counts)

    def _counts(self, expr: Any) -> bool:
        """Whether an element belongs to a row or range table or to a tensor of conditions."""
        tensor = expr.args[0]
        made = tensor in self.tables or tensor in self.ranges
        return made or self.is_condition(tensor)

    def is_condition(self, tensor: Any) -> bool:
        """Whether a symbol stands for a tensor of 0 and 1."""
        return tensor in self.tensors and self.tensors[tensor].dtype == "bool"

    def sign(self, expr: Any) -> int | None:
        """1 for ``expr >= 0``, -1 for ``expr <= 0``, None where that is unknown."""
        if self.at_least(expr, 0):
            return 1
        return -1 if self.at_least(-expr, 0) else None

    def direction(self, expr: Any, position: Any) -> int | None:
        """1 where ``expr`` never falls as the position grows, -1 where it never rises, 0 where it
        does not depend on it. None: unknown, or neither.
        """
        if position not in expr.free_symbols:
            return 0
        if expr == position:
            return 1
        if expr.is_Mul:
            scalars = [arg for arg in expr.args if position not in arg.free_symbols]
            others = [arg for arg in expr.args if position in arg.free_symbols]
            sign = self.sign(sympy.Mul(*scalars))
            moved = self.direction(others[0], position) if len(others) == 1 else None
            return None if sign is None or moved is None else sign * moved
        if isinstance(expr, FloorDiv) and position not in expr.args[1].free_symbols:
            return self.direction(expr.args[0], position)
        if expr.is_Add or isinstance(expr, sympy.Min | sympy.Max):
            moves = {self.direction(arg, position) for arg in expr.args} - {0}
            return moves.pop() if len(moves) == 1 else None
        if isinstance(expr, Load):
            tensor, *lead, index = expr.args
            fixed = not any(map(is_of_tile, lead))  # each call checks whether the tensor is sorted
            steady = fixed and self.ascends(tensor) and self.size(tensor) is not None
            return self.direction(index, position) if steady else None
        return None

    def size(self, tensor: Any) -> Any | None:
        """The size of a tensor's or table's last dimension, None where unknown."""
        if tensor in self.tables:
            return last_size(self.tables[tensor].values)
        return last_size(self.tensors[tensor]) if tensor in self.tensors else None

    def ascends(self, tensor: Any) -> bool:
        """Whether the elements never fall along the last dimension."""
        if tensor in self.tables:
            return self.tables[tensor].values.sorted
        return tensor in self.tensors and self.tensors[tensor].sorted

    def step(self, expr: Any, position: Any) -> Any | None:
        """The most that ``expr`` moves, either way, when the position moves by one."""
        if position not in expr.free_symbols:
            return sympy.Integer(0)
        if expr == position:
            return sympy.Integer(1)
        if expr.is_Mul or expr.is_Add:
            steps = [self.step(arg, position) for arg in expr.args]
            if expr.is_Add:
                return None if None in steps else sympy.Add(*steps)
            moving = [i for i, arg in enumerate(expr.args) if position in arg.free_symbols]
            factor = sympy.Mul(*(arg for i, arg in enumerate(expr.args) if i not in moving))
            sign, step = self.sign(factor), steps[moving[0]]
            return sign * factor * step if len(moving) == 1 and sign and step is not None else None
        if isinstance(expr, FloorDiv) and position not in expr.args[1].free_symbols:
            step, divisor = self.step(expr.args[0], position), expr.args[1]
            if step is None or not step.is_Integer:
                return None
            return -(-step // divisor) if divisor.is_Integer else step
        if isinstance(expr, sympy.Min | sympy.Max):
            steps = [self.step(arg, position) for arg in expr.args]
            if None in steps:
                return None
            largest = sympy.Max(*steps)
            return None if isinstance(largest, sympy.Max) else largest
        return None
