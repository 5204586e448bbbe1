"""Promise: what a kernel does where ids are not in the promised order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.trace import Orientation, Predicate

#: The variable that says so in a kernel: it then visits everything, and asks the mask as written.
UNORDERED = "unordered"


@dataclass(frozen=True)
class Promise:
    """Of a mask whose bounds trust the order of ids.

    Attributes:
        broken: sympy Boolean, the same for a whole batch entry and head: they are in another order.
        as_written: conditions of the mask that trust nothing; all hold for a visible key.
    """

    broken: Any
    as_written: tuple[Any, ...]

    @property
    def names(self) -> frozenset[str]:
        """What it reads."""
        exprs = (self.broken, *self.as_written)
        return frozenset(symbol.name for expr in exprs for symbol in expr.free_symbols)


def promise_of(predicate: Predicate, *orientations: Orientation) -> Promise | None:
    """What a predicate, solved for these, takes on trust; None where it is nothing.

    Args:
        predicate: the user's own.
        orientations: which index it is solved for; for both, where a kernel's mask is solved for
            one and its bounds for the other.
    """
    broken = sympy.Or(*(with_row_tables(predicate, one).unordered for one in orientations))
    return None if broken is sympy.false else Promise(broken, conditions(predicate.expr))


@dataclass(frozen=True)
class KeptPromise:
    """The same as a kernel computes it.

    Attributes:
        broken: `Promise.broken`.
        conditions: `Promise.as_written`.
    """

    broken: Code
    conditions: tuple[Code, ...]
