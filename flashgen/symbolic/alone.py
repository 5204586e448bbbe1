"""What a mask says of one position alone: keys that no query sees, queries that see no key."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.logic import conditions, negation_normal_form
from flashgen.symbolic.trace import POSITIONS, Predicate


def conditions_alone(predicate: Predicate, position: Any) -> tuple[Any, ...]:
    """The conditions of a mask that read this position and not the other.

    A key for which one of them does not hold is hidden from every query of its batch entry and
    head, and a query sees no key.

    Args:
        predicate: the user's own, which trusts nothing.
        position: `KV_IDX` or `Q_IDX`.
    """
    terms = conditions(negation_normal_form(predicate.expr))
    pairs = [term.args for term in terms if isinstance(term, sympy.Eq)]
    same = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    # Of two elements that are equal, what holds for one holds for the other.
    others = (term.xreplace(same) for term in terms if not isinstance(term, sympy.Eq))
    every = dict.fromkeys((*terms, *others))
    return tuple(term for term in every if POSITIONS & term.free_symbols == {position})
