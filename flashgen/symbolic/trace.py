"""trace: from a mask to the predicate that bounds are derived from and kernels print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.expr import Int
from flashgen.masks import Mask
from flashgen.symbolic.affine import linearise
from flashgen.symbolic.logic import POSITIONS, negation_normal_form
from flashgen.symbols import KV_IDX, Q_IDX


@dataclass(frozen=True, eq=False)
class Predicate:
    """What a mask says, as data.

    Attributes:
        expr: sympy Boolean over b, h, q_idx, kv_idx, q_len, kv_len and the parameters: ``And`` and
            ``Or`` of comparisons, each with kv_idx alone on one side where it can be.
        params: the run-time parameters, in the order of first use.
        equal_lengths: defined for q_len == kv_len only.
        label: how the user wrote the mask.
    """

    expr: Any
    params: tuple[Int, ...] = ()
    equal_lengths: bool = False
    label: str = "mask"


def trace(mask: Mask) -> Predicate:
    """Call the mask's function once, with symbols.

    Raises:
        MaskError: the function fails on symbols or does not return a boolean.
    """
    expr = _arranged(negation_normal_form(mask.traced.sym))
    return Predicate(expr, mask.params, mask.equal_lengths, mask.label)


def _arranged(expr: Any) -> Any:
    """Every comparison as ``q_idx + ... >= kv_idx`` or ``kv_idx >= q_idx + ...``.

    A kernel then adds to the rows' vector, once, and compares with the columns' vector: one
    operation an element. Strictness stays as the user wrote it.
    """
    if isinstance(expr, sympy.And | sympy.Or):
        return expr.func(*map(_arranged, expr.args))
    if isinstance(expr, sympy.Le | sympy.Lt):
        expr = expr.reversed
    if not isinstance(expr, sympy.Ge | sympy.Gt | sympy.Eq | sympy.Ne):
        return expr
    difference = linearise(expr.lhs - expr.rhs, POSITIONS)
    if difference is None:
        return expr
    for alone in (KV_IDX, Q_IDX):
        c = difference.coefficient(alone)
        if abs(c) == 1:
            rest = difference.without(alone).to_sympy()
            symmetric = isinstance(expr, sympy.Eq | sympy.Ne)
            if symmetric:
                return expr.func(-c * rest, alone, evaluate=False)
            if c > 0:
                return expr.func(alone, -rest, evaluate=False)
            return expr.func(rest, alone, evaluate=False)
    return expr
