"""EagerKeys: the keys that a module in eager torch computes for a tile of queries.

Python's numbers are all that its bounds read, so a loop needs no tensor: what else only tensors
know makes the bounds wider. Row tables are among the numbers: as lists, over all batch entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.params import Float, Int, Tensor
from flashgen.plan.visible_pairs import loosened, says
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.printer import python_source
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import KV_LEN, Q_FIRST, Q_LAST, Q_LEN, Load


@dataclass(frozen=True)
class EagerElement:
    """An element of a row table, over all batch entries.

    Attributes:
        table: the table.
        least: whether it is the least of all entries, or the greatest.
        row: its position, as text.
    """

    table: RowTable
    least: bool
    row: str


@dataclass(frozen=True)
class EagerKeys:
    """The keys of the queries ``q_first`` to ``q_last``, as text of Python.

    Attributes:
        begin: the first key that one of them may see.
        end: the key behind the last.
        full: ``(begin, end)`` of keys that all of them see, each empty if its end is not above its
            begin; without those that only tensors know.
        numbers: parameters that they read.
        tables: the row tables that they read.
        elements: those of the tables that they read; they call them ``found[0]`` and so on.
        loosened: whether tensors would make them tighter.
    """

    begin: str
    end: str
    full: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]
    tables: tuple[RowTable, ...]
    elements: tuple[EagerElement, ...]
    loosened: bool

    @property
    def ids(self) -> tuple[str, ...]:
        """The tensors that the row tables are made from."""
        return tuple(dict.fromkeys(x.name for table in self.tables for x in table.tensors))


def eager_keys(bounds: TileBounds, params: tuple[Param, ...]) -> EagerKeys:
    """The keys of a tile, over all runs of keys, heads and batch entries."""
    numbers = {param.name for param in params if isinstance(param, Int | Float)}
    known = {symbol.name for symbol in (Q_FIRST, Q_LAST, Q_LEN, KV_LEN)} | numbers
    tensors = {param.name for param in params if isinstance(param, Tensor)}
    tables = [t for t in bounds.tables if all(x.name in tensors for x in t.tensors)]
    elements = _Elements(tables, known)

    def low(part: Any) -> Any:
        """A number that is not above an end of a run, for any batch entry."""
        return loosened(elements.read(part, least=True), sympy.Integer(0), known | elements.names)

    def high(part: Any) -> Any:
        return loosened(elements.read(part, least=False), KV_LEN, known | elements.names)

    runs = bounds.intervals
    begins, ends = [low(run.begin) for run in runs], [high(run.end) for run in runs]
    begin = sympy.Max(0, sympy.Min(*begins))
    end = sympy.Min(KV_LEN, sympy.Max(*ends))
    full = []
    for run in runs:
        last = low(sympy.sympify(run.full_end))
        first = KV_LEN if last == 0 else high(sympy.sympify(run.full_begin))
        if first not in (last, KV_LEN):
            full.append((first, last))
    expressions = (begin, end, *(part for pair in full for part in pair))
    read = {symbol.name for part in expressions for symbol in part.free_symbols}
    tight: list[Any] = [(run.begin, run.end) for run in runs]
    return EagerKeys(
        begin=python_source(begin),
        end=python_source(end),
        full=tuple((python_source(first), python_source(last)) for first, last in full),
        numbers=tuple(param.name for param in params if param.name in read),
        tables=tuple(dict.fromkeys(element.table for element in elements.found)),
        elements=elements.found,
        loosened=tight != list(zip(begins, ends, strict=True)),
    )


class _Elements:
    """Elements of row tables, and the symbols that stand for them."""

    def __init__(self, tables: Iterable[RowTable], known: set[str]) -> None:
        self._tables = {table.sym: table for table in tables if table.side != "unordered"}
        self._known = known
        self._symbols: dict[EagerElement, Any] = {}

    @property
    def found(self) -> tuple[EagerElement, ...]:
        return tuple(self._symbols)

    @property
    def names(self) -> set[str]:
        return {symbol.name for symbol in self._symbols.values()}

    def read(self, expr: Any, *, least: bool) -> Any:
        """An end of a run, with extremes over batch entries in the place of elements.

        Elsewhere than in minima and maxima an element may count the other way.
        """
        if isinstance(expr, sympy.Min | sympy.Max):
            return expr.func(*(self.read(part, least=least) for part in expr.args))
        if not isinstance(expr, Load) or expr.args[0] not in self._tables:
            return expr
        table, row = self._tables[expr.args[0]], expr.args[-1]
        if not says(row, self._known):
            return expr
        element = EagerElement(table, least, python_source(row))
        symbol = sympy.Symbol(f"found[{len(self._symbols)}]", integer=True)
        return self._symbols.setdefault(element, symbol)
