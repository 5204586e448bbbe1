"""place: code of the kernel, each part of it where it is computed least often."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.octets import octets_of
from flashgen.symbolic.places import SCORES, Place, is_integral
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.regroup import PREFIXES, Regrouper, is_condition, replaced
from flashgen.symbols import KV_IDX, SCORE, SYMBOLS, Load


@dataclass(frozen=True)
class Assignment:
    """``name = code``.

    Attributes:
        name: a variable of the kernel.
        code: what it is.
        used_by: which results, by their number, need it.
    """

    name: str
    code: Code
    used_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placed:
    """Expressions as code, hoisted as far as they can be.

    Attributes:
        scalars: once a program.
        rows: once a tile of queries, after the scalars; (BLOCK_M, 1) vectors, as q_idx is.
        columns: once a tile of keys; (1, BLOCK_N) vectors, as kv_idx is.
        elements: (BLOCK_M, BLOCK_N) values that occur several times, after the columns.
        results: one for each expression that was placed, after the elements.
        carried: the names that columns, elements and results read besides kv_idx, the score and
            one another: symbols as the kernel calls them, then scalars, then rows.
        octets: for each result that is a condition, its `octets_of`; None where it has none.
    """

    scalars: tuple[Assignment, ...]
    rows: tuple[Assignment, ...]
    columns: tuple[Assignment, ...]
    elements: tuple[Assignment, ...]
    results: tuple[Code, ...]
    carried: tuple[str, ...]
    octets: tuple[Code | None, ...]


def place(
    exprs: Sequence[Any],
    names: Mapping[str, str] | None = None,
    *,
    nonnegative: Collection[str] = (),
    taken: Collection[str] = (),
    along: Place | None = None,
    bits: Mapping[Any, Any] | None = None,
) -> Placed:
    """Splits expressions by what needs them: a program, a tile of queries or keys, an element.

    Of a condition only what is loaded is hoisted, and what is a float: comparisons of integers stay
    as they are. Parts that several expressions share are computed once.

    Args:
        exprs: numbers and conditions over b, h, q_idx, kv_idx, the score and parameters.
        names: the text for a symbol, as in ``{"b": "batch"}``; others print their name.
        nonnegative: parameters known to be >= 0; see `triton_code`.
        taken: names that the new variables must not have, besides those in the expressions.
        along: what the columns of a tile are of, where conditions are computed as bits, too.
        bits: of comparisons whose bits are at hand, these.
    """
    names = dict(names or {})
    symbols = {symbol.name for expr in exprs for symbol in expr.free_symbols}
    regrouper = Regrouper({*symbols, *names.values(), *taken})
    forms = [regrouper.result(expr) for expr in exprs]
    forms = _shared(forms, regrouper)
    definitions = regrouper.definitions
    tensors = [symbol.name for symbol, (where, _) in definitions.items() if where]

    def code(form: Any, where: Place) -> Code:
        approximate = where == Place.ELEMENT
        return triton_code(form, names, nonnegative, tensors, approximate=approximate)

    def octets(form: Any) -> Code | None:
        if along is None or not is_condition(form):
            return None
        found = octets_of(form, along, regrouper.place, bits or {})
        return None if found is None else code(found, Place.ELEMENT)

    users = _users(forms, definitions)
    assignments: dict[Place, list[Assignment]] = {where: [] for where in PREFIXES}
    for symbol, (where, form) in definitions.items():
        assignment = Assignment(symbol.name, code(form, where), users[symbol])
        assignments[where].append(assignment)
    return Placed(
        scalars=tuple(assignments[Place.SCALAR]),
        rows=tuple(assignments[Place.ROW]),
        columns=tuple(assignments[Place.COLUMN]),
        elements=tuple(assignments[Place.ELEMENT]),
        results=tuple(code(form, Place.ELEMENT) for form in forms),
        carried=_carried(forms, definitions, names),
        octets=tuple(map(octets, forms)),
    )


def _shared(forms: list[Any], regrouper: Regrouper) -> list[Any]:
    """The forms with a name for each float, and each load, that occurs in them more than once."""
    times: dict[Any, int] = {}

    def visit(node: Any) -> None:
        if not node.args:
            return
        if _is_worth_a_name(node) and regrouper.place(node) == Place.ELEMENT:
            times[node] = times.get(node, 0) + 1
            if times[node] > 1:
                return
        for arg in node.args:
            visit(arg)
        if node.is_Pow and node.exp.is_number and abs(node.exp) > 1:
            visit(node.base)  # a product prints its base as often

    for form in forms:
        visit(form)
    names: dict[Any, Any] = {}
    for node in sorted((node for node, n in times.items() if n > 1), key=_size):
        form = replaced(node, names)
        names[node] = regrouper.define(node, form)
    return [replaced(form, names) for form in forms]


def _is_worth_a_name(node: Any) -> bool:
    if isinstance(node, Load):
        return True
    if is_condition(node) or not isinstance(node, sympy.Expr) or is_integral(node):
        return False
    return not (node.is_Mul and len(node.args) == 2 and node.args[0] == -1)


def _size(node: Any) -> tuple[int, str]:
    """Parts come before what they are parts of."""
    return sum(1 for _ in sympy.preorder_traversal(node)), str(node)


def _users(forms: list[Any], definitions: Mapping[Any, Any]) -> dict[Any, tuple[int, ...]]:
    """Which results need each definition, by themselves or through another one."""
    users: dict[Any, set[int]] = {symbol: set() for symbol in definitions}
    for i, form in enumerate(forms):
        waiting = set(form.free_symbols)
        while waiting:
            symbol = waiting.pop()
            if symbol in users and i not in users[symbol]:
                users[symbol].add(i)
                waiting |= definitions[symbol][1].free_symbols
    return {symbol: tuple(sorted(numbers)) for symbol, numbers in users.items()}


def _carried(
    forms: Iterable[Any], definitions: Mapping[Any, Any], names: Mapping[str, str]
) -> tuple[str, ...]:
    inside = (Place.COLUMN, Place.ELEMENT)
    read = {symbol for form in forms for symbol in form.free_symbols}
    for where, form in definitions.values():
        read |= form.free_symbols if where in inside else set()
    read -= {KV_IDX, SCORE, SCORES}
    outside = [symbol for symbol in read if symbol not in definitions]
    outside.sort(key=lambda s: (SYMBOLS.index(s) if s in SYMBOLS else len(SYMBOLS), s.name))
    hoisted = [
        symbol
        for wanted in (Place.SCALAR, Place.ROW)
        for symbol, (where, _) in definitions.items()
        if where == wanted and symbol in read
    ]
    return tuple(names.get(symbol.name, symbol.name) for symbol in outside + hoisted)
