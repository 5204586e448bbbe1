"""Comparisons of sorted tensors, as in ``doc[b, q_idx] == doc[b, kv_idx]``, as ranges of a row.

If a tensor T ascends along its last dimension, the keys with ``T[kv_idx] == x`` are the positions
from the first j with ``T[j] >= x`` to before the first j with ``T[j] > x``. If x is an element that
depends on the row alone, row tables (`RowTable`), made once a call, hold both ends.

If another condition hides an id, ``doc[b, kv_idx] != -1``, the table replaces this condition too.

The caller promises that ids are sorted. Each call checks the promise, and a kernel does not use
these ranges for ids in another order: `Predicate.unordered` is then true at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import sympy

from flashgen.constants import Constant
from flashgen.params import Tensor
from flashgen.symbolic.context import Context
from flashgen.symbolic.tables import RowTable
from flashgen.symbolic.trace import KEYS_OF_ROWS, Orientation, Predicate, is_of_tile
from flashgen.symbols import Load

#: What a comparison becomes with its sides exchanged.
SWAPPED = {
    sympy.Eq: sympy.Eq, sympy.Ne: sympy.Ne,
    sympy.Ge: sympy.Le, sympy.Le: sympy.Ge, sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt,
}  # fmt: skip


#: The id that is hidden, if any, and whether in an Or: see `RowTable`.
Hidden = tuple[int | None, bool]
_NONE: Hidden = (None, False)


@functools.lru_cache(1024)
def with_row_tables(predicate: Predicate, orientation: Orientation = KEYS_OF_ROWS) -> Predicate:
    """The predicate, with row tables in every comparison that they can replace.

    The new predicate is equivalent while its tensors keep their promises; `unordered` is true when
    a promise is broken. (The predicate hides pairs whose indices lie outside of a tensor, which a
    mask never shows.) Its `tables` are the row tables that it reads. The kernel prints the new
    predicate, so that a tile's mask reads a row's range once and compares it with positions.
    """
    return rewritten(predicate, orientation)[0]


def rewritten(predicate: Predicate, orientation: Orientation) -> tuple[Predicate, dict[Any, Any]]:
    """The result of `with_row_tables`, and the user's comparison behind each new one."""
    origins: dict[Any, Any] = {}
    context = Context(predicate, orientation)
    tables: dict[str, RowTable] = {table.name: table for table in predicate.tables}
    tensors = {param.sym: param for param in predicate.params if isinstance(param, Tensor)}
    names = {param.name for param in predicate.params}

    def looks_up(expr: Any) -> bool:
        sides = ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs))
        return any(_is_lookup(key, value, orientation, tensors) for key, value in sides)

    in_order = _ordered(predicate.expr, looks_up)
    promises: dict[Any, None] = {}  # elements that tell whether a promise is broken

    def table(
        keys: Tensor, values: Tensor, side: str, hides: Hidden, cyclic: bool | None = None
    ) -> RowTable:
        if cyclic is None:
            cyclic = not {keys.sym, values.sym} & in_order
        for known in tables.values():
            if (*known.search, known.side) == (keys.name, values.name, cyclic, hides[0], side):
                tables[known.name] = replace(known, outside=known.outside or hides[1])
                return known
        name = f"{keys.name}_{_NAMES[side]}"
        name += "" if keys.name == values.name else f"_of_{values.name}"
        while name in names or name in tables:
            name += "_"
        tables[name] = RowTable(name, keys, values, side, cyclic, *hides)
        return tables[name]

    def visit(expr: Any, hides: Hidden = _NONE) -> Any:
        if isinstance(expr, sympy.And | sympy.Or):
            return expr.func(*(visit(part, of) for part, of in _parts(expr, looks_up)))
        if not isinstance(expr, sympy.core.relational.Relational):
            return expr
        for relation, key, value in (
            (expr.func, expr.lhs, expr.rhs),
            (SWAPPED[expr.func], expr.rhs, expr.lhs),
        ):
            if _is_lookup(key, value, orientation, tensors):
                keys, values = tensors[key.args[0]], tensors[value.args[0]]
                at = value.args[1:]

                def place(side: str) -> Any:
                    return Load(table(keys, values, side, hides).sym, *at)  # noqa: B023

                if _promises(keys) or _promises(values):
                    promises[Load(table(keys, values, "unordered", hides).sym, *at[:-1], 0)] = None

                found = _range(relation, key.args[-1], place)
                origins.update(dict.fromkeys((found, *found.args), expr))
                if relation is sympy.Eq:
                    return found  # outside of the tensors the range is empty
                conditions = (*context.inside_when(key), *context.inside_when(value))
                return sympy.And(found, *conditions)
        return expr

    expr = visit(predicate.expr)
    for element in sorted(expr.atoms(Load), key=str):
        tensor, *lead, _ = element.args
        if tensor in tensors and _promises(tensors[tensor]) and not any(map(is_of_tile, lead)):
            itself = tensors[tensor]
            flag = table(itself, itself, "unordered", _NONE, cyclic=False)
            promises[Load(flag.sym, *lead, 0)] = None
    made = replace(
        predicate,
        expr=expr,
        tables=tuple(table for table in tables.values() if table.side != "unordered"),
        flags=tuple(table for table in tables.values() if table.side == "unordered"),
        unordered=sympy.Or(*(sympy.Ne(flag, 0, evaluate=False) for flag in promises)),
    )
    return made, origins


#: The suffix of a table's name, by its side.
_NAMES = {"left": "begin", "right": "end", "unordered": "unordered"}


def _promises(tensor: Tensor) -> bool:
    """Whether the caller declares the tensor sorted; a build checks a constant itself."""
    return tensor.sorted and not isinstance(tensor, Constant)


def _parts(expr: Any, looks_up: Callable[[Any], bool]) -> list[tuple[Any, Hidden]]:
    """The parts of an And, each with the id that another part hides from its comparison.

    The hiding part, ``doc[b, kv_idx] != -1``, is left out. An Or is treated the same way, negated.
    """
    equal, unequal = (sympy.Eq, sympy.Ne) if isinstance(expr, sympy.And) else (sympy.Ne, sympy.Eq)
    hides: dict[Any, tuple[int, Any]] = {}
    for part in expr.args:
        for element, number in permutations(part.args) if isinstance(part, unequal) else ():
            if isinstance(element, Load) and number.is_Integer and -(2**31) <= number < 2**31:
                hides.setdefault(element, (int(number), part))
    hidden: dict[Any, Hidden] = {}
    left_out: list[Any] = []
    for part in expr.args:
        if isinstance(part, equal) and looks_up(part):
            for element in part.args:
                if element in hides and part not in hidden:
                    number, other = hides[element]
                    hidden[part] = number, isinstance(expr, sympy.Or)
                    left_out.append(other)
    return [(part, hidden.get(part, _NONE)) for part in expr.args if part not in left_out]


def _ordered(expr: Any, looks_up: Callable[[Any], bool]) -> frozenset[Any]:
    """Tensors whose elements are used outside of tests for equality."""
    if isinstance(expr, sympy.And | sympy.Or):
        parts = (part for part, _ in _parts(expr, looks_up))
        return frozenset[Any]().union(*(_ordered(part, looks_up) for part in parts))
    if isinstance(expr, sympy.Eq | sympy.Ne) and all(isinstance(x, Load) for x in expr.args):
        indices = [index for element in expr.args for index in element.args[1:]]
        return frozenset(load.args[0] for index in indices for load in index.atoms(Load))
    return frozenset(load.args[0] for load in expr.atoms(Load))


def _is_lookup(key: Any, value: Any, orientation: Orientation, tensors: dict[Any, Tensor]) -> bool:
    """Whether ``key`` is an element of a sorted tensor, whose last index alone depends on the
    solved position, and ``value`` one of a tensor of the same leading dimensions, which does not.
    """
    if not (isinstance(key, Load) and isinstance(value, Load)):
        return False
    keys, *lead, index = key.args
    values, *lead_of_value, _ = value.args
    positions = {orientation.tile, orientation.solved}
    return (
        keys in tensors
        and values in tensors
        and tensors[keys].sorted
        and tensors[values].dtype == "int32"
        and lead == lead_of_value
        and _leading(tensors[keys]) == _leading(tensors[values])
        and index.free_symbols & positions == {orientation.solved}
        and orientation.solved not in value.free_symbols
        and not any(positions & i.free_symbols for i in lead)
    )


def _leading(tensor: Tensor) -> list[str]:
    return [str(dim) for dim in tensor.dims[:-1]]


def _range(relation: Any, index: Any, place: Any) -> Any:
    """``T[index] <relation> x`` as conditions on the index; ``place`` finds x from one side."""

    def at_least(side: str) -> Any:
        return sympy.Ge(index, place(side), evaluate=False)

    def below(side: str) -> Any:
        return sympy.Lt(index, place(side), evaluate=False)

    if relation is sympy.Eq:
        return sympy.And(at_least("left"), below("right"))
    if relation is sympy.Ne:
        return sympy.Or(below("left"), at_least("right"))
    if relation is sympy.Ge:
        return at_least("left")
    if relation is sympy.Gt:
        return at_least("right")
    return below("left") if relation is sympy.Lt else below("right")
