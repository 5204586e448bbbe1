"""TileWork: how long tiles of keys take, by which packed sequences' tiles are put in order."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.plan.backward import BackwardPlan
from flashgen.symbolic.printer import triton_code
from flashgen.symbols import KV_FIRST, KV_LAST, KV_LEN, Q_LEN

#: What is a vector, with an element for each tile.
VECTORS = (KV_FIRST, KV_LAST, KV_LEN, Q_LEN)


@dataclass(frozen=True)
class TileWork:
    """The queries that some key of a tile is seen by, for many tiles at once.

    Attributes:
        begin, end: the first one, and the one behind the last, as Triton source.
        scalars: the parameters that these read.
        ints: those of them whose values never cause a recompile.
        names: the variables that these read.
    """

    begin: str
    end: str
    scalars: tuple[str, ...]
    ints: tuple[str, ...]
    names: frozenset[str]


def tile_work(backward: BackwardPlan) -> TileWork:
    """By the bounds; all queries where bounds differ between heads, or read tensors.

    Only the order of tiles depends on it.
    """
    first, *others = backward.q_bounds.intervals
    begin, end = first.begin, sympy.Max(first.end, *(interval.end for interval in others))
    for interval in others:
        begin = sympy.Min(begin, interval.begin)
    arguments, known = backward.both_arguments, {symbol.name for symbol in VECTORS}
    read = {symbol.name for expr in (begin, end) for symbol in expr.free_symbols}
    if not read <= known | set(arguments.scalars):
        begin, end, read = sympy.Integer(0), Q_LEN, {Q_LEN.name}
    scalars = tuple(name for name in arguments.scalars if name in read)
    return TileWork(
        begin=_code(begin),
        end=_code(end),
        scalars=scalars,
        ints=tuple(name for name in scalars if name in arguments.ints),
        names=frozenset(read),
    )


def _code(expr: sympy.Expr) -> str:
    return triton_code(expr, tensors=[symbol.name for symbol in VECTORS]).text()
