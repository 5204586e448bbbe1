"""VisiblePairs: how a module counts the pairs of a query and a key that its mask shows.

Without asking the mask of each pair: the bounds of a tile of one query mostly say which keys it
sees, so that a sum over queries does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.params import Float, Int
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.printer import python_source
from flashgen.symbols import (
    BATCH,
    KV_LEN,
    Q_FIRST,
    Q_HEADS,
    Q_IDX,
    Q_LAST,
    Q_LEN,
    B,
    H,
    RowMax,
    RowMin,
)

#: What is counted one by one where the bounds depend on it, and how many there are.
_COUNTED = {Q_IDX: Q_LEN, H: Q_HEADS, B: BATCH}

#: With more extremes of rows sympy does not simplify minima and maxima, which takes it seconds.
MAX_COMPARED = 4


@dataclass(frozen=True)
class VisiblePairs:
    """A sum over queries, as text; its lengths and parameters are Python's numbers.

    Attributes:
        keys: of one query; ``""`` where they lie in several runs.
        runs: each ``(begin, end)``; they may overlap.
        over: what it is a sum over: ``("q_idx", "q_len")``, and heads or batch entries.
        times: the sizes that the sum is multiplied by, for all else that a call has of them.
        numbers: parameters that it reads.
        exact: whether it counts what is seen and nothing else; otherwise it counts too many.
    """

    keys: str
    runs: tuple[tuple[str, str], ...]
    over: tuple[tuple[str, str], ...]
    times: tuple[str, ...]
    numbers: tuple[str, ...]
    exact: bool


def visible_pairs(bounds: TileBounds, params: tuple[Param, ...]) -> VisiblePairs:
    """The pairs that a mask shows, by the bounds that were derived from it."""
    numbers = {param.name for param in params if isinstance(param, Int | Float)}
    known = {symbol.name for symbol in (*_COUNTED, *_COUNTED.values(), KV_LEN)} | numbers
    runs = [_run(interval, known) for interval in bounds.intervals]
    read = {symbol for begin, end, _ in runs for symbol in (begin.free_symbols | end.free_symbols)}
    over = {symbol: size for symbol, size in _COUNTED.items() if symbol in read}
    return VisiblePairs(
        keys=python_source(_number(bounds.intervals[0], *runs[0])) if len(runs) == 1 else "",
        runs=tuple((python_source(begin), python_source(end)) for begin, end, _ in runs),
        over=tuple((symbol.name, size.name) for symbol, size in over.items()),
        times=tuple(_COUNTED[symbol].name for symbol in (B, H, Q_IDX) if symbol not in over),
        numbers=tuple(p.name for p in params if p.name in {symbol.name for symbol in read}),
        exact=bounds.exact and all(exact for _, _, exact in runs),
    )


def _run(interval: Interval, known: set[str]) -> tuple[Any, Any, bool]:
    """``(begin, end, exact)`` of one query's keys, as far as lengths and numbers say."""
    begin, end, condition = map(of_one_row, (interval.begin, interval.end, interval.condition))
    first = loosened(begin, sympy.Integer(0), known)
    last = loosened(end, KV_LEN, known)
    holds = condition if says(condition, known) else sympy.true
    exact = (first, last, holds) == (begin, end, condition)
    if holds is not sympy.true:
        last = sympy.Piecewise((last, holds), (sympy.Integer(0), True))
    return first, last, exact


def _number(interval: Interval, begin: Any, end: Any, exact: bool) -> Any:
    """How many keys are in a run."""
    if interval.nonempty or (begin, end) == (0, KV_LEN):
        return end - begin
    return sympy.Max(0, end - begin)


def of_one_row(expr: Any) -> Any:
    """A bound of a tile for a tile of one query."""
    expr = sympy.sympify(expr)
    compared = len(expr.atoms(RowMin, RowMax)) <= MAX_COMPARED

    def visit(part: Any) -> Any:
        if isinstance(part, RowMin | RowMax):
            return visit(part.args[0])
        if not part.args:
            return Q_IDX if part in (Q_FIRST, Q_LAST) else part
        args = [visit(arg) for arg in part.args]
        if isinstance(part, sympy.Min | sympy.Max) and not compared:
            distinct = list(dict.fromkeys(args))
            return part.func(*distinct, evaluate=False) if len(distinct) > 1 else distinct[0]
        return part if tuple(args) == part.args else part.func(*args)

    return visit(expr)


def loosened(expr: Any, most: Any, known: set[str]) -> Any:
    """An end of a run of keys by known names, with the end of all keys for whatever others say."""
    if says(expr, known):
        return expr
    if isinstance(expr, sympy.Min | sympy.Max):
        return expr.func(*(loosened(part, most, known) for part in expr.args))
    return most


def says(expr: Any, known: set[str]) -> bool:
    """Whether Python's numbers are all that it is made of: an element has its tensor's symbol.

    An extreme over the rows of a tile is found by a kernel alone.
    """
    return all(s.name in known for s in expr.free_symbols) and not expr.has(RowMin, RowMax)
