"""Axioms: inequalities between a compound term and the terms that it consists of.

Proofs treat a compound term, such as a quotient, as a further symbol with these axioms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy

from flashgen.symbolic.affine import Affine, linearise, symbol
from flashgen.symbolic.declarations import Declarations
from flashgen.symbolic.entailment import Axioms, quotient_axioms
from flashgen.symbols import (
    KV_FIRST,
    KV_IDX,
    KV_LAST,
    Q_FIRST,
    Q_IDX,
    Q_LAST,
    FloorDiv,
    Load,
    RowMax,
    RowMin,
)

_TILE_ENDS = ((Q_FIRST, Q_LAST), (KV_FIRST, KV_LAST))


#: Places in row tables: the search that makes the table (`RowTable.search`), and the indices.
Places = frozenset[tuple[Any, tuple[Any, ...]]]


def axioms_of(
    declarations: Declarations, inside: Callable[[Any], bool], hidden: Places = frozenset()
) -> Axioms:
    """The axioms of a term, given the declarations.

    Args:
        declarations: the declarations.
        inside: whether an index of a tensor element is known to lie inside of the tensor.
        hidden: the places with hidden ids. Rows that see a key have no hidden id.
    """

    @cache
    def axioms(term: Any) -> tuple[Affine, ...]:
        return tuple(_axioms(term, declarations, inside, hidden))

    return axioms


def _axioms(
    term: Any,
    declarations: Declarations,
    inside: Callable[[Any], bool],
    hidden: Places = frozenset(),
) -> list[Affine]:
    found = list(quotient_axioms(term))
    t = symbol(term)
    if declarations.at_least(term, 1):
        found.append(t - 1)
    elif declarations.at_least(term, 0):
        found.append(t)
    for first, last in _TILE_ENDS:
        direction = declarations.direction(term, first)
        if direction and last not in term.free_symbols and all(map(inside, term.atoms(Load))):
            found += [(a - t) * direction for a in _linear(term.xreplace({first: last}))]
    if isinstance(term, RowMin | RowMax):
        return found + _of_rows(term, declarations, inside)
    if isinstance(term, Load):
        return found + _of_element(term, declarations, inside, hidden)
    scalars, core = term.as_independent(FloorDiv, sympy.Min, sympy.Max, as_Add=False)
    if isinstance(core, FloorDiv):
        found += _of_quotient(t, scalars, core, declarations)
    elif isinstance(core, sympy.Min | sympy.Max) and declarations.at_least(scalars, 0):
        sign = 1 if isinstance(core, sympy.Max) else -1
        found += [(t - arg) * sign for arg in _linear(*(scalars * arg for arg in core.args))]
    elif isinstance(term, sympy.Abs):
        found += [t - arg for arg in _linear(term.args[0], -term.args[0])]
    elif isinstance(term, sympy.Piecewise) and all(value.is_Integer for value, _ in term.args):
        values = [int(value) for value, _ in term.args]
        found += [t - min(values), -t + max(values)]
    return found


def _linear(*exprs: Any) -> list[Affine]:
    return [affine for expr in exprs if (affine := linearise(expr)) is not None]


def _of_quotient(t: Affine, factor: Any, quotient: Any, declarations: Declarations) -> list[Affine]:
    """``t = factor * (n // d)``: if factor divides d, ``0 <= n - d * (n // d) <= d - 1``."""
    numerator, divisor = quotient.args
    if divisor.is_Integer and factor == 1:
        return []  # quotient_axioms has it
    times = divisor / factor
    if times.is_Integer:
        parts = _linear(numerator, divisor)
        if len(parts) < 2:
            return []
        remainder = parts[0] - t * int(times)
        return [remainder, -remainder + parts[1] - 1]
    below = _linear(numerator * factor)
    return [below[0] - t] if below and declarations.at_least(numerator * factor, 0) else []


def _of_element(
    term: Any, declarations: Declarations, inside: Callable[[Any], bool], hidden: Places
) -> list[Affine]:
    """The axioms of an element of a row or range table or of a tensor of conditions."""
    tensor, *_, index = term.args
    t = symbol(term)
    if declarations.is_condition(tensor):
        return [-t + 1]
    if tensor in declarations.ranges:
        most = declarations.ranges[tensor].most
        return [] if most is None else [limit - t for limit in _linear(most)]
    if tensor not in declarations.tables:
        return []
    table = declarations.tables[tensor]
    found = [] if table.most is None else [most - t for most in _linear(table.most)]
    exchanged = (table.search, term.args[1:]) in hidden
    if table.of_itself and inside(term):
        begins = (table.side == "left") != exchanged
        found += [i - t if begins else t - i - 1 for i in _linear(index)]
    if table.side == "left" and not table.outside:
        for other in declarations.tables.values():
            if (*other.search, other.side) == (*table.search, "right"):
                length = symbol(Load(other.sym, *term.args[1:])) - t
                found.append(-length if exchanged else length)
    return found


def _of_rows(term: Any, declarations: Declarations, inside: Callable[[Any], bool]) -> list[Affine]:
    """The axioms of the least or greatest value over rows: a bound of every row bounds it too."""
    inner = term.args[0]
    least, greatest = symbol(RowMin(inner)), symbol(RowMax(inner))
    found = [greatest - least]
    for atom in _axioms(inner, declarations, inside) if not inner.is_Add else ():
        c, rest = atom.coefficient(inner), atom.without(inner)
        if c and not any({Q_IDX, KV_IDX} & other.free_symbols for other, _ in rest.terms):
            found.append(rest + symbol(term) * c)
    return found
