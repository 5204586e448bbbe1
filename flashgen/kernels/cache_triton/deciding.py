"""DecidedTiles: which tiles of keys a step visits, of a mask whose bounds are too wide."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.params import Int
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.loops import KERNEL_NAMES
from flashgen.plan.wide_bounds import excess_of_bounds
from flashgen.symbolic.logic import conditions
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.tile_answers import left_to_data
from flashgen.symbols import H

#: The texts of positions and heads: of some rows, and of the keys of some tiles.
_ELEMENTS = {"q_idx": "q_idx[:, None]", "kv_idx": "kv_idx[None, :]"}


@dataclass(frozen=True)
class DecidedTiles:
    """What the kernel evaluates that decides a cache's tiles: each element of the mask.

    Attributes:
        elements: the conditions of an element.
        by_head: whether heads differ: each head of keys then has lists of its own.
        names: the parameters that the conditions read.
    """

    elements: tuple[Code, ...]
    by_head: bool
    names: frozenset[str]


def decided_tiles(plan: KernelPlan) -> DecidedTiles:
    """The kernel of a mask, whatever its bounds are."""
    predicate = plan.predicate
    by_head = H in predicate.expr.free_symbols
    names = KERNEL_NAMES | _ELEMENTS | ({"h": "head[:, None]"} if by_head else {})
    nonnegative = [p.name for p in plan.spec.params if isinstance(p, Int) and p.min >= 0]
    return DecidedTiles(
        elements=tuple(triton_code(x, names, nonnegative) for x in conditions(predicate.expr)),
        by_head=by_head,
        names=frozenset(symbol.name for symbol in predicate.expr.free_symbols),
    )


def bounds_are_wide(plan: KernelPlan) -> bool:
    """Whether bounds leave out conditions on data, or visit much that no query sees."""
    predicate = plan.predicate
    return bool(left_to_data(predicate)) or excess_of_bounds(predicate).too_wide
