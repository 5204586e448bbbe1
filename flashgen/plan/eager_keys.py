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
from flashgen.plan.visible_pairs import loosened
from flashgen.symbolic.bounds import TileBounds
from flashgen.symbolic.printer import python_source
from flashgen.symbols import KV_LEN, Q_FIRST, Q_LAST, Q_LEN


@dataclass(frozen=True)
class EagerKeys:
    """The keys of the queries ``q_first`` to ``q_last``, as text of Python.

    Attributes:
        begin: the first key that one of them may see.
        end: the key behind the last.
        numbers: parameters that they read.
        loosened: whether tensors would make them tighter.
    """

    begin: str
    end: str
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
    read = {symbol.name for symbol in begin.free_symbols | end.free_symbols}
    tight: list[Any] = [(run.begin, run.end) for run in bounds.intervals]
    return EagerKeys(
        begin=python_source(begin),
        end=python_source(end),
        numbers=tuple(param.name for param in params if param.name in read),
        loosened=tight != list(zip(begins, ends, strict=True)),
    )
