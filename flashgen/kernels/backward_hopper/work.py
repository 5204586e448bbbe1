"""How long tiles of keys take, by which they are divided and packed sequences' are put in order."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.plan.backward import BackwardPlan
from flashgen.symbolic.printer import python_source, triton_code
from flashgen.symbols import KV_FIRST, KV_LAST, KV_LEN, Q_LEN, FloorDiv, Load

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


def longest_visit(backward: BackwardPlan) -> str:
    """The queries that visit the longest tile of keys, as Python source, if it is a head's first.

    It reads q_len, kv_len, ``block_n`` and integers of the call. Empty where another tile is the
    longest, where each chunk has long and short ones, and where bounds read tensors, or differ
    between heads.
    """
    bounds = backward.q_bounds
    if bounds.longest_first != "first" or len(bounds.intervals) > 1:
        return ""
    of_first = {KV_FIRST: sympy.Integer(0), KV_LAST: sympy.Symbol("block_n", integer=True) - 1}
    begin, end = (x.subs(of_first) for x in (bounds.intervals[0].begin, bounds.intervals[0].end))
    names = {symbol.name for symbol in (end - begin).free_symbols}
    if end.has(FloorDiv, Load) or not names <= {
        "q_len",
        "kv_len",
        "block_n",
        *backward.both_arguments.ints,
    }:
        return ""
    return python_source(end if begin == 0 else end - begin)


def _code(expr: sympy.Expr) -> str:
    return triton_code(expr, tensors=[symbol.name for symbol in VECTORS]).text()
