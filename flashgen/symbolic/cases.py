"""cases_of: a predicate as conjunctions that are solved one by one, and the facts for that."""

from __future__ import annotations

from dataclasses import replace

from flashgen.symbolic.context import Context
from flashgen.symbolic.gathers import rewritten
from flashgen.symbolic.key_ranges import key_ranges
from flashgen.symbolic.logic import Conjunction, conjunctions
from flashgen.symbolic.trace import Orientation, Predicate


def cases_of(
    predicate: Predicate, orientation: Orientation, *, ranges: bool
) -> tuple[Context, list[Conjunction]]:
    """The facts about a predicate, and the conjunctions that it is the disjunction of.

    With ``ranges``, conditions on the solved position alone have a range: see `key_ranges`.
    """
    read_by_table, origins = rewritten(predicate, orientation)
    of_keys, tables = key_ranges(read_by_table, orientation) if ranges else ({}, [])
    context = Context(read_by_table, orientation, origins, of_keys, tuple(tables))
    found = conjunctions(context.predicate.expr, context.element, context.read)
    return context, [replace(x, atoms=x.atoms + context.ranges(x.atoms)) for x in found]
