"""The fast set of calls: for every two things that calls differ in, each pair of values meets.

Faults of kernels come from one thing (a length that ends in the middle of a tile) or from two
together (that, and keys in the layout of a projection). A set of calls in which each pair occurs
is some twentieth of the product, and finds nearly as many; `support.mutants` says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allpairspy import AllPairs

Row = dict[str, Any]


def all_pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows in which every two values of different factors stand together, if that is allowed.

    Args:
        factors: the values of each, by name. The same factors give the same rows.
        allowed: whether a row may be, of which the last factors may still be missing.
    """
    names = list(factors)

    def is_allowed(values: Sequence[Any]) -> bool:
        return allowed(dict(zip(names, values, strict=False)))

    rows = AllPairs([list(values) for values in factors.values()], filter_func=is_allowed)
    return [dict(zip(names, row, strict=True)) for row in rows]


#: What a length may be beside the side of a tile: nothing over, one over, one short, some over; of
#: no whole tile, of one and of several. The places inside a tile differ from side to side.
LENGTHS: dict[str, Callable[[int], int]] = {
    "one": lambda side: 1,
    "part of a tile": lambda side: side // 2 + 3,
    "a tile": lambda side: side,
    "one more": lambda side: side + 1,
    "one less than two": lambda side: 2 * side - 1,
    "several and a part": lambda side: 3 * side + side // 4 + 1,
}
