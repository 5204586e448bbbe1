"""Runs: causal masks that cut a sequence into runs, of one id or of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbols import KV_IDX, Q_IDX, B, FloorDiv, Load

#: A query sees the keys up to its own position.
CAUSAL = sympy.Ge(Q_IDX, KV_IDX)

#: The id of positions that are no run's.
OF_PADDING = -1


@dataclass(frozen=True)
class Runs:
    """What a causal mask shows of a sequence: of each run, its own keys alone.

    Attributes:
        tensor: the symbol of the tensor of ids; None where runs have one length.
        by_batch: whether each sequence has ids of its own.
        padded: whether positions of the id -1 see nothing, and are seen by none.
        length: the positions of a run, a number or the symbol of one; None where ids say.
    """

    tensor: Any = None
    by_batch: bool = False
    padded: bool = False
    length: Any = None

    @property
    def of_ids(self) -> bool:
        """Whether ids say which position is of which run: one that returns is not a run's."""
        return self.tensor is not None

    @property
    def parameter(self) -> str:
        """The argument that says where runs end; ``""`` where the mask has a number."""
        symbol = self.tensor if self.of_ids else self.length
        return symbol.name if symbol.is_Symbol else ""


def runs_of(expr: Any) -> Runs | None:
    """The runs of a traced mask; None for a mask of another kind.

    It has to be causal within positions for which the same expression has one value: an element of
    a tensor of integers, or the number of a block of positions.
    """
    parts = set(expr.args) if isinstance(expr, sympy.And) else set()
    if CAUSAL not in parts:
        return None
    equal = [part for part in parts if isinstance(part, sympy.Eq)]
    others = parts.difference(equal, {CAUSAL})
    if len(equal) != 1:
        return None
    of_query, of_key = sorted(equal[0].args, key=lambda side: bool(side.has(KV_IDX)))
    if of_query.xreplace({Q_IDX: KV_IDX}) != of_key or of_query == of_key:
        return None
    if isinstance(of_query, FloorDiv) and of_query.args[0] == Q_IDX:
        length = of_query.args[1]
        fixed = (length.is_Integer and length > 0) or length.is_Symbol
        return Runs(length=length) if fixed and not others else None
    if isinstance(of_query, Load) and of_query.args[1:] in ((B, Q_IDX), (Q_IDX,)):
        hides = {sympy.Ne(of_query, OF_PADDING), sympy.Ne(of_key, OF_PADDING)}
        if not of_query.is_integer or others - hides:
            return None
        return Runs(of_query.args[0], B in of_query.args[1:], bool(others))
    return None
