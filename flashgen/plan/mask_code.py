"""Seen: conditions for a pair to be seen, as the Gluon kernels print them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashgen.plan.block_tables import BlockBits
from flashgen.plan.promise import PrintedPromise
from flashgen.plan.text import mentioned

#: Columns of a tile that LLVM compares one by one: the outcomes of more it packs into bits.
FEW_COLUMNS = 64

_COMPARISON = re.compile(r"\b(?:_at_least|_below)\(")


@dataclass(frozen=True)
class Seen:
    """Conditions that all have to hold, in one of two ways.

    Attributes:
        pairs: the text of each, computed for every pair.
        octets: the text of their bits, computed for octets of columns.
        rows: vectors of rows that bits are made of.
        tables: what they read of block tables.
    """

    pairs: tuple[str, ...]
    octets: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    tables: tuple[BlockBits, ...] = ()


def seen(
    conditions: Iterable[tuple[str, str]],
    position: str,
    rows: Iterable[str],
    *,
    least: int,
    tables: Iterable[BlockBits] = (),
) -> Seen:
    """Conditions by how they are computed.

    Bits cost the same however many columns there are, and take less registers than comparisons that
    LLVM packs. They do not pay where rows alone are told apart, where a condition has none, nor
    where they save few comparisons.

    Args:
        conditions: the text of each, and of its bits, ``""`` where it has none.
        position: what the columns of a tile are told apart by.
        rows: the names of vectors of rows.
        least: comparisons from which on bits pay.
        tables: what bits read of block tables: pairs would load an element each.
    """
    conditions = tuple(conditions)
    pairs = tuple(text for text, _ in conditions)
    octets = tuple(bits for _, bits in conditions)
    tables = tuple(tables)
    if not all(octets) or not (tables or mentioned([position], octets)):
        return Seen(pairs)
    comparisons = sum(len(_COMPARISON.findall(bits)) for bits in octets)
    if comparisons < least and not tables:
        return Seen(pairs)
    names = tuple(rows)
    read = mentioned(names, (*octets, *(table.entry for table in tables)))
    return Seen((), octets, tuple(name for name in names if name in read), tables)


def helped(seen: Seen, row: str, promise: PrintedPromise | None) -> Seen:
    """What has octets in a kernel: `seen`, and where ids are out of order the mask as written.

    Args:
        seen: what a masked tile asks.
        row: the position of a row.
        promise: what that trusts.
    """
    if promise is None:
        return seen
    return replace(seen, octets=(*seen.octets, *promise.conditions), rows=seen.rows or (row,))


def least_comparisons(columns: int, *, scored: bool) -> int:
    """From how many on bits pay in a backward kernel, whose tiles have this many columns.

    One comparison of few columns is cheaper where a score function has all registers taken.
    """
    return 2 if scored and columns <= FEW_COLUMNS else 1


def rows_end(of: str) -> tuple[str, str]:
    """The condition that a row of the scores is one, of q or kv, and its bits."""
    text = f"{of}_idx < {of}_len"
    return text, f"tl.where({text}, -1, 0)"


def columns_end(of: str) -> tuple[str, str]:
    """The condition that a column of the scores is one, of q or kv, and its bits."""
    return f"{of}_idx < {of}_len", f"_below({of}_idx, {of}_len)"
