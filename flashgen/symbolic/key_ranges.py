"""Conditions that a tensor's elements say of a key alone, as ``keep[b, kv_idx]``: ranges of keys.

Nothing is known of the elements before a call. In each call a kernel finds the first and the last
key that such a condition shows, and a run of keys that are all shown (`RangeTable`): bounds by the
former skip no key, bounds by the latter mask all keys that are hidden. Padding is one run, and a
tile inside of it needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sympy.core.relational import Relational

from flashgen.params import Tensor
from flashgen.symbolic.affine import Affine
from flashgen.symbolic.context import Context
from flashgen.symbolic.gathers import SWAPPED
from flashgen.symbolic.inequalities import of_range
from flashgen.symbolic.logic import leaves, negation_normal_form
from flashgen.symbolic.tables import LEAST, MOST, Ranges, RangeTable, last_size
from flashgen.symbolic.trace import Orientation, Predicate, is_of_tile
from flashgen.symbols import KV_LEN, Q_LEN, Load


def key_ranges(predicate: Predicate, orientation: Orientation) -> tuple[Ranges, list[RangeTable]]:
    """The conditions of a predicate on the solved position alone, and their tables."""
    tensors = {param.sym: param for param in predicate.params if isinstance(param, Tensor)}
    lengths = {orientation.solved_len}
    lengths |= {Q_LEN, KV_LEN} if predicate.equal_lengths else set()
    names = {param.name for param in predicate.params} | {t.name for t in predicate.tables}
    found: Ranges = {}
    tables: dict[str, RangeTable] = {}
    for leaf in leaves(negation_normal_form(predicate.expr)):
        read = _element_of(leaf, orientation, tensors)
        if read is None or last_size(tensors[read[0].args[0]]) not in lengths:
            continue
        (tensor, *lead, _), shown = read[0].args, read[1:]
        table = RangeTable(*_named(tensors[tensor], shown, names))
        tables[table.name] = table
        begin, end, full_begin, full_end = (Load(table.sym, *lead, i) for i in range(4))
        found[leaf] = begin, end, full_begin, full_end
    return found, list(tables.values())


def _element_of(
    leaf: Any, orientation: Orientation, tensors: dict[Any, Tensor]
) -> tuple[Any, int, int, bool] | None:
    """The element that a condition compares with a number, and what it shows; see `RangeTable`."""
    if not isinstance(leaf, Relational):
        return None
    for relation, element, number in (
        (leaf.rel_op, leaf.lhs, leaf.rhs),
        (SWAPPED[leaf.func].rel_op, leaf.rhs, leaf.lhs),
    ):
        if not (isinstance(element, Load) and number.is_Integer and LEAST < number < MOST):
            continue
        tensor, *lead, index = element.args
        alone = index == orientation.solved and not any(map(is_of_tile, lead))
        if not alone or tensor not in tensors or tensors[tensor].dtype not in ("bool", "int32"):
            continue
        c = int(number)
        low, high = {
            "==": (c, c), "!=": (c, c),
            ">=": (c, MOST), ">": (c + 1, MOST), "<=": (LEAST, c), "<": (LEAST, c - 1),
        }[relation]  # fmt: skip
        return element, low, high, relation == "!="
    return None


def _named(
    tensor: Tensor, shown: tuple[int, int, bool], names: set[str]
) -> tuple[str, Tensor, int, int, bool]:
    """The arguments of a table; conditions of both orientations share its name."""
    low, high, but = shown
    name = f"{tensor.name}_range"
    if tensor.dtype != "bool":
        ends = (str(end) if end >= 0 else f"minus_{-end}" for end in (low, high) if abs(end) < MOST)
        name += f"_{'but_' * but}{'_'.join(ends)}"
    elif (low != 0) == but:
        name += "_hidden"
    while name in names:
        name += "_"
    return name, tensor, low, high, but


def holds_range(atoms: Iterable[Affine], part: Any, context: Context) -> bool:
    """Whether a condition has a range, of whose inequalities none was left out as redundant.

    What makes one redundant may show only what lies between the first and the last key.
    """
    if part not in context.key_ranges:
        return False
    return {*of_range(context.key_ranges[part], context.orientation)} <= {*atoms}


def certain(atom: Affine, ranges: Ranges) -> Affine:
    """An inequality that holds only for keys that are surely shown."""
    exchanged: dict[Any, Any] = {}
    for begin, end, full_begin, full_end in ranges.values():
        exchanged |= {begin: full_begin, end: full_end}
    return Affine.of({term.xreplace(exchanged): c for term, c in atom.terms}, atom.const)
