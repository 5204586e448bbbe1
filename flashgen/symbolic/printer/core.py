"""Printer: from a sympy expression to text, by one rule for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from flashgen.symbolic.printer.dialects import Dialect
from flashgen.symbolic.printer.text import Operand, closed, number_text
from flashgen.symbolic.varies_over import REDUCTIONS, is_integral
from flashgen.symbols import BitAnd, FloorDiv, FloorMod, Load, ShiftLeft, ShiftRight

#: The names of the vectors, in place of q_idx and kv_idx, that `RowMin` and `RowMax` reduce.
OVER_TILE = {"q_idx": "q_rows", "kv_idx": "kv_rows"}


@dataclass(frozen=True)
class Printer:
    """Prints expressions in one dialect.

    Attributes:
        dialect: the language.
        rules: the rule for each kind of node; a node without a rule is an error.
        names: the text for a symbol's name; others print their name.
        nonnegative: names of symbols known to be >= 0.
        tensors: names of symbols that are tensors in this language, not plain numbers.
        approximate: whether ``tanh`` may use the hardware's instruction if the kernel's APPROX is
            set.
        read: the names that have been printed for symbols.
    """

    dialect: Dialect
    rules: Mapping[Any, Callable[[Printer, Any], str]]
    names: Mapping[str, str]
    nonnegative: frozenset[str]
    tensors: frozenset[str]
    approximate: bool = True
    read: set[str] = field(default_factory=set)

    def text(self, expr: Any) -> str:
        """``expr`` in a place that needs no parentheses."""
        if expr.is_Symbol:
            name = self.names.get(expr.name, expr.name)
            self.read.add(name)
            return Operand(name)
        if expr in (sympy.true, sympy.false):
            return Operand(bool(expr))
        if expr.is_Number:
            return number_text(expr)
        rule = self.rules.get(expr.func)
        if rule is None:
            raise TypeError(f"the printer does not know {expr.func.__name__}: {expr}")
        if expr.is_number and not expr.is_Mul and not is_integral(expr):
            return number_text(expr)
        return rule(self, expr)

    def operand(self, expr: Any) -> str:
        """``expr`` as an operand of ``*``, ``//``, ``%``, ``&`` or ``|``."""
        return closed(self.text(expr))

    def real(self, expr: Any) -> str:
        """``expr`` among floats: an integer expression is converted as a whole."""
        if expr.is_Integer or not is_integral(expr):
            return self.text(expr)
        return self.converted(expr)

    def converted(self, expr: Any) -> str:
        """An integer expression as a float."""
        if expr in self.dialect.floats:
            return Operand(self.dialect.floats[expr])
        return self.dialect.to_float(self.text(expr), self.is_tensor(expr))

    def real_operand(self, expr: Any) -> str:
        """``expr`` as a float operand; see `real` and `operand`."""
        return closed(self.real(expr))

    def matching(self, *exprs: Any) -> Callable[[Any], str]:
        """`text` if all ``exprs`` are integers, else `real`."""
        return self.text if all(map(is_integral, exprs)) else self.real

    def over_rows(self) -> Printer:
        """A printer that prints q_idx or kv_idx as the vector of a tile's positions."""
        rows = {**self.names, **{i: self.names.get(over, over) for i, over in OVER_TILE.items()}}
        return replace(self, names=rows)

    def is_tensor(self, expr: Any) -> bool:
        """Whether ``expr`` is a tensor in this language, not a plain number."""
        if expr.is_Symbol:
            return expr.name in self.tensors
        if isinstance(expr, REDUCTIONS):
            return False
        if isinstance(expr, Load) and self.dialect.loads_are_tensors:
            return True
        return any(map(self.is_tensor, expr.args))

    def is_nonnegative(self, expr: Any) -> bool:
        """Whether ``expr`` is a sum of products of quantities that are never negative."""
        if expr.is_Symbol:
            return expr.name in self.nonnegative
        if expr.is_Integer:
            return bool(expr >= 0)
        if isinstance(expr, FloorMod | sympy.Abs):
            return True
        if isinstance(expr, BitAnd):
            return any(map(self.is_nonnegative, expr.args))
        if isinstance(expr, FloorDiv | ShiftLeft | ShiftRight):
            return self.is_nonnegative(expr.args[0])
        sums = sympy.Add | sympy.Mul | sympy.Pow
        return isinstance(expr, sums) and all(map(self.is_nonnegative, expr.args))
