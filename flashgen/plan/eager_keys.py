"""EagerKeys: the keys that a module in eager torch computes for a tile of queries.

Python's numbers are all that its bounds read, so a loop needs no tensor: what only tensors know
makes the bounds wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.params import Float, Int
from flashgen.plan.visible_pairs import loosened, says
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.intervals import Interval
from flashgen.symbolic.printer import python_source
from flashgen.symbols import KV_LEN, Q_FIRST, Q_LAST, Q_LEN


@dataclass(frozen=True)
class EagerKeys:
    """The keys of the queries ``q_first`` to ``q_last``, as text of Python.

    Attributes:
        begin: the first key that one of them may see.
        end: the key behind the last.
        full: ``(begin, end)`` of keys that all of them see, each empty if its end is not above its
            begin; without those that only tensors know.
        numbers: parameters that they read.
        loosened: whether tensors would make them tighter.
    """

    begin: str
    end: str
    full: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]
    loosened: bool


def eager_keys(bounds: TileBounds, params: tuple[Param, ...]) -> EagerKeys:
    """The keys of a tile, over all runs of keys, heads and batch entries."""
    numbers = {param.name for param in params if isinstance(param, Int | Float)}
    known = {symbol.name for symbol in (Q_FIRST, Q_LAST, Q_LEN, KV_LEN)} | numbers
    begins = [loosened(run.begin, sympy.Integer(0), known) for run in bounds.intervals]
    ends = [loosened(run.end, KV_LEN, known) for run in bounds.intervals]
    begin = sympy.Max(0, sympy.Min(*begins))
    end = sympy.Min(KV_LEN, sympy.Max(*ends))
    full = [found for run in bounds.intervals if (found := _full(run, known))]
    expressions = (begin, end, *(part for pair in full for part in pair))
    read = {symbol.name for part in expressions for symbol in part.free_symbols}
    tight: list[Any] = [(run.begin, run.end) for run in bounds.intervals]
    return EagerKeys(
        begin=python_source(begin),
        end=python_source(end),
        full=tuple((python_source(begin), python_source(end)) for begin, end in full),
        numbers=tuple(param.name for param in params if param.name in read),
        loosened=tight != list(zip(begins, ends, strict=True)),
    )


def _full(run: Interval, known: set[str]) -> tuple[Any, Any] | None:
    """The ends of the keys of a run that need no mask; None where numbers do not tell them."""
    begin, end = map(sympy.sympify, (run.full_begin, run.full_end))
    return (begin, end) if begin != end and says(begin, known) and says(end, known) else None
