"""Seen: conditions for a pair to be seen, as the Gluon kernels of the backward pass print them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.plan.block_tables import BlockBits
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
    columns: int,
    *,
    scored: bool,
    tables: Iterable[BlockBits] = (),
) -> Seen:
    """Conditions by how they are computed.

    Bits cost the same however many columns there are, and take less registers than comparisons that
    LLVM packs. They do not pay where rows alone are told apart, where a condition has none, nor
    where they save one comparison of few columns and a score function has all registers taken.

    Args:
        conditions: the text of each, and of its bits, ``""`` where it has none.
        position: what the columns of a tile are told apart by.
        rows: the names of vectors of rows.
        columns: of a tile.
        scored: whether there is a score function.
        tables: what bits read of block tables: pairs would load an element each.
    """
    conditions = tuple(conditions)
    pairs = tuple(text for text, _ in conditions)
    octets = tuple(bits for _, bits in conditions)
    tables = tuple(tables)
    if not all(octets) or not (tables or mentioned([position], octets)):
        return Seen(pairs)
    comparisons = sum(len(_COMPARISON.findall(bits)) for bits in octets)
    if scored and comparisons == 1 and columns <= FEW_COLUMNS and not tables:
        return Seen(pairs)
    names = tuple(rows)
    read = mentioned(names, (*octets, *(table.entry for table in tables)))
    return Seen((), octets, tuple(name for name in names if name in read), tables)


def rows_end(of: str) -> tuple[str, str]:
    """The condition that a row of the scores is one, of q or kv, and its bits."""
    text = f"{of}_idx < {of}_len"
    return text, f"tl.where({text}, -1, 0)"


def columns_end(of: str) -> tuple[str, str]:
    """The condition that a column of the scores is one, of q or kv, and its bits."""
    return f"{of}_idx < {of}_len", f"_below({of}_idx, {of}_len)"
