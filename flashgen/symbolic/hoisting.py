"""hoist: moves each part of the kernel's code to where it is computed least often."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.arctangent import with_polynomials
from flashgen.symbolic.column_bitmask import column_bitmask
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.reassociate import PREFIXES, Reassociation, is_condition, replaced
from flashgen.symbolic.varies_over import SCORES, Axes, is_integral
from flashgen.symbols import KV_IDX, SCORE, SYMBOLS, Load

#: Names of the bits of conditions of each column alone begin with it.
OWN_BITS = "own_bits"


@dataclass(frozen=True)
class Assignment:
    """``name = code``.

    Attributes:
        name: a variable of the kernel.
        code: its expression.
        used_by: the numbers of the results that need it.
    """

    name: str
    code: Code
    used_by: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hoisted:
    """Expressions as code, hoisted as far as they can be.

    Attributes:
        scalars: once a program.
        rows: once a tile of queries, after the scalars; (BLOCK_M, 1) vectors, as q_idx is.
        columns: once a tile of keys; (1, BLOCK_N) vectors, as kv_idx is.
        elements: (BLOCK_M, BLOCK_N) values that occur several times, after the columns.
        results: one for each expression that was hoisted, after the elements.
        carried: the names that columns, elements and results read besides kv_idx, the score and
            one another: symbols as the kernel calls them, then scalars, then rows.
        bitmasks: the `column_bitmask` of each result that is a condition; None without one.
        own_bits: conditions of each column alone, whose bits these bitmasks read by their names.
    """

    scalars: tuple[Assignment, ...]
    rows: tuple[Assignment, ...]
    columns: tuple[Assignment, ...]
    elements: tuple[Assignment, ...]
    results: tuple[Code, ...]
    carried: tuple[str, ...]
    bitmasks: tuple[Code | None, ...]
    own_bits: tuple[Assignment, ...]


def needed_for(lines: Iterable[Assignment], names: Iterable[str]) -> tuple[Assignment, ...]:
    """Those of these lines, in their order, on which variables of these names depend."""
    read = set(names)
    found: list[Assignment] = []
    for line in reversed([*lines]):
        if line.name in read:
            read |= line.code.names
            found.insert(0, line)
    return tuple(found)


def hoist(
    exprs: Sequence[Any],
    names: Mapping[str, str] | None = None,
    *,
    nonnegative: Collection[str] = (),
    taken: Collection[str] = (),
    along: Axes | None = None,
    bits: Mapping[Any, Any] | None = None,
    own: bool = False,
) -> Hoisted:
    """Splits expressions by axes: once for a program, a tile of queries or keys, or an element.

    In a condition only loads and floats are hoisted: comparisons of integers stay as they are.
    Parts that several expressions share are computed once.

    Args:
        exprs: numbers and conditions over b, h, q_idx, kv_idx, the score and parameters.
        names: the text for a symbol, as in ``{"b": "batch"}``; other symbols print their name.
        nonnegative: parameters known to be >= 0; see `triton_code`.
        taken: names that the new variables must not have, besides those in the expressions.
        along: what the columns of a tile are, if conditions are computed as bits, too.
        bits: the bits of comparisons that have been computed already.
        own: whether conditions of each column alone have bits.
    """
    names = dict(names or {})
    symbols = {symbol.name for expr in exprs for symbol in expr.free_symbols}
    reassociation = Reassociation({*symbols, *names.values(), *taken})
    forms = [reassociation.result(with_polynomials(expr)) for expr in exprs]
    forms = _shared(forms, reassociation)
    definitions = reassociation.definitions
    tensors = [symbol.name for symbol, (where, _) in definitions.items() if where]

    def code(form: Any, where: Axes) -> Code:
        approximate = where == Axes.ELEMENT
        return triton_code(form, names, nonnegative, tensors, approximate=approximate)

    own_bits: dict[Any, Any] = {}

    def named(condition: Any) -> Any:
        if condition not in own_bits:
            own_bits[condition] = reassociation.new_symbol(OWN_BITS)
        return own_bits[condition]

    def bitmask(form: Any) -> Code | None:
        if along is None or not is_condition(form):
            return None
        of_columns = named if own else None
        found = column_bitmask(form, along, reassociation.varies_over, bits or {}, of_columns)
        return None if found is None else code(found, Axes.ELEMENT)

    bitmasks = tuple(map(bitmask, forms))

    users = _users(forms, definitions)
    assignments: dict[Axes, list[Assignment]] = {where: [] for where in PREFIXES}
    for symbol, (where, form) in definitions.items():
        assignment = Assignment(symbol.name, code(form, where), users[symbol])
        assignments[where].append(assignment)
    return Hoisted(
        scalars=tuple(assignments[Axes.SCALAR]),
        rows=tuple(assignments[Axes.ROW]),
        columns=tuple(assignments[Axes.COLUMN]),
        elements=tuple(assignments[Axes.ELEMENT]),
        results=tuple(code(form, Axes.ELEMENT) for form in forms),
        carried=_carried(forms, definitions, names),
        bitmasks=bitmasks,
        own_bits=tuple(Assignment(x.name, code(form, Axes.COLUMN)) for form, x in own_bits.items()),
    )


def _shared(forms: list[Any], reassociation: Reassociation) -> list[Any]:
    """The forms, with a name for each float and each load that occurs more than once."""
    times: dict[Any, int] = {}

    def visit(node: Any) -> None:
        if not node.args:
            return
        if _is_worth_a_name(node) and reassociation.varies_over(node) == Axes.ELEMENT:
            times[node] = times.get(node, 0) + 1
            if times[node] > 1:
                return
        for arg in node.args:
            visit(arg)
        if node.is_Pow and node.exp.is_number and abs(node.exp) > 1:
            visit(node.base)  # a product prints its base that many times

    for form in forms:
        visit(form)
    names: dict[Any, Any] = {}
    for node in sorted((node for node, n in times.items() if n > 1), key=_size):
        form = replaced(node, names)
        names[node] = reassociation.define(node, form)
    return [replaced(form, names) for form in forms]


def _is_worth_a_name(node: Any) -> bool:
    if isinstance(node, Load):
        return True
    if is_condition(node) or not isinstance(node, sympy.Expr) or is_integral(node):
        return False
    return not (node.is_Mul and len(node.args) == 2 and node.args[0] == -1)


def _size(node: Any) -> tuple[int, str]:
    """The sort key by which parts come before the expressions that contain them."""
    return sum(1 for _ in sympy.preorder_traversal(node)), str(node)


def _users(forms: list[Any], definitions: Mapping[Any, Any]) -> dict[Any, tuple[int, ...]]:
    """The results that need each definition, directly or through another definition."""
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
    inside = (Axes.COLUMN, Axes.ELEMENT)
    read = {symbol for form in forms for symbol in form.free_symbols}
    for where, form in definitions.values():
        read |= form.free_symbols if where in inside else set()
    read -= {KV_IDX, SCORE, SCORES}
    outside = [symbol for symbol in read if symbol not in definitions]
    outside.sort(key=lambda s: (SYMBOLS.index(s) if s in SYMBOLS else len(SYMBOLS), s.name))
    hoisted = [
        symbol
        for wanted in (Axes.SCALAR, Axes.ROW)
        for symbol, (where, _) in definitions.items()
        if where == wanted and symbol in read
    ]
    return tuple(names.get(symbol.name, symbol.name) for symbol in outside + hoisted)
