"""Promise: what a kernel does where ids are not in the promised order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.trace import Orientation, Predicate

#: The kernel's variable for unordered ids: it then visits all tiles, with the mask as written.
UNORDERED = "unordered"


@dataclass(frozen=True)
class Promise:
    """The promise of a mask whose bounds trust the order of ids.

    Attributes:
        broken: sympy Boolean, the same for a batch entry and head: the ids are in another order.
        as_written: conditions of the mask that trust nothing; all hold for a visible key.
    """

    broken: Any
    as_written: tuple[Any, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names that the promise reads."""
        exprs = (self.broken, *self.as_written)
        return frozenset(symbol.name for expr in exprs for symbol in expr.free_symbols)


def promise_of(predicate: Predicate, *orientations: Orientation) -> Promise | None:
    """The promise that a predicate relies on in these orientations; None if it relies on none.

    Args:
        predicate: the user's predicate.
        orientations: the indices that it is solved for: both, if a kernel's mask is solved for one
            and its bounds for the other.
    """
    broken = sympy.Or(*(with_row_tables(predicate, one).unordered for one in orientations))
    return None if broken is sympy.false else Promise(broken, conditions(predicate.expr))


@dataclass(frozen=True)
class KeptPromise:
    """A promise as code of a kernel.

    Attributes:
        broken: `Promise.broken`.
        conditions: `Promise.as_written`.
    """

    broken: Code
    conditions: tuple[Code, ...]
