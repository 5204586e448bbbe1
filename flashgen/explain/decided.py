"""Tiles of a mask that only the data knows, on numbers: what `_classify_tiles` decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import sympy

from flashgen.explain.numbers import python_function
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.tile_answers import TILE, OfTile, tile_answers
from flashgen.symbolic.trace import Predicate
from flashgen.symbolic.varies_over import Axes
from flashgen.symbols import KV_FIRST, KV_IDX, KV_LAST, Q_FIRST, Q_IDX, Q_LAST

_ENDS = (Q_FIRST, Q_LAST, KV_FIRST, KV_LAST)


def answers_in_words(predicate: Predicate) -> tuple[str, str]:
    """When a tile may be seen, and when it is full, by what the mask reads of it."""
    answers = tile_answers(predicate)
    named = {}
    for read in answers.reads:
        kinds = ("some", "all") if read.is_condition else ("min", "max")
        for kind, end in zip(kinds, read.ends, strict=True):
            named[end] = sympy.Symbol(f"{kind}({plain_source(read.expr)})")
    seen, full = (plain_source(x.xreplace(named)) for x in (answers.seen, answers.full))
    return seen, full


def decided_tiles(
    predicate: Predicate, values: Mapping[str, Any]
) -> Callable[[int, int], tuple[bool, bool]]:
    """(whether an element is visible, whether all are) of a tile, by its number each way.

    Args:
        predicate: the mask.
        values: lengths, and values of parameters and constants.
    """
    answers = tile_answers(predicate)
    element = python_function((Q_IDX, KV_IDX), (predicate.expr,), values)
    ends = [end for read in answers.reads for end in read.ends]
    decide = python_function((*_ENDS, *ends), (answers.seen, answers.full), values)
    reads = [_extremes(read, values) for read in answers.reads]
    q_len, kv_len = values["q_len"], values["kv_len"]

    @cache
    def decided(row: int, column: int) -> tuple[bool, bool]:
        q_first, kv_first = TILE * row, TILE * column
        tile = (
            q_first, min(q_first + TILE, q_len) - 1, kv_first, min(kv_first + TILE, kv_len) - 1,
        )  # fmt: skip
        seen, full = decide(*tile, *(end for read in reads for end in read(*tile)))
        if seen and not full:
            elements = (
                bool(element(q, kv)[0])
                for q in range(tile[0], tile[1] + 1)
                for kv in range(tile[2], tile[3] + 1)
            )
            first = next(elements)
            # All are alike, or some are seen and some are not.
            seen, full = (first, first) if all(x == first for x in elements) else (True, False)
        return bool(seen), bool(full)

    return decided


def _extremes(read: OfTile, values: Mapping[str, Any]) -> Callable[..., tuple[Any, Any]]:
    """The ends of what is read of a tile's rows, or of its keys."""
    of_rows = read.over == Axes.ROW
    evaluated = python_function((Q_IDX if of_rows else KV_IDX, *_ENDS), (read.expr,), values)
    by_tile = bool({Q_FIRST, KV_FIRST} & read.expr.free_symbols)

    @cache
    def ends(*tile: int) -> tuple[Any, Any]:
        first, last = tile[:2] if of_rows else tile[2:]
        found = [evaluated(i, *tile)[0] for i in range(first, last + 1)]
        return (any(found), all(found)) if read.is_condition else (min(found), max(found))

    def of(*tile: int) -> tuple[Any, Any]:
        if by_tile:
            return ends(*tile)
        return ends(*tile[:2], 0, 0) if of_rows else ends(0, 0, *tile[2:])

    return of
