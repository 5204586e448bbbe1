"""The operators that a mask function may use: what each does to values and to sympy expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbols import FloorDiv, FloorMod


def _relation(cls: Any) -> Callable[[Any, Any], Any]:
    """A comparison that keeps the two sides as written, folded only when it is constant."""

    def build(a: Any, b: Any) -> Any:
        difference = a - b
        if difference.is_Integer:
            return cls(difference, 0)
        return cls(a, b, evaluate=False)

    return build


@dataclass(frozen=True)
class Operation:
    """One operator: on values, on sympy expressions, and whether it takes integers."""

    concrete: Callable[..., Any]
    symbolic: Callable[..., Any]
    takes_integers: bool = True


OPERATIONS = {
    "+": Operation(operator.add, operator.add),
    "-": Operation(operator.sub, operator.sub),
    "*": Operation(operator.mul, operator.mul),
    "//": Operation(operator.floordiv, FloorDiv),
    "%": Operation(operator.mod, FloorMod),
    "neg": Operation(operator.neg, operator.neg),
    "abs": Operation(abs, sympy.Abs),
    ">=": Operation(operator.ge, _relation(sympy.Ge)),
    ">": Operation(operator.gt, _relation(sympy.Gt)),
    "<=": Operation(operator.le, _relation(sympy.Le)),
    "<": Operation(operator.lt, _relation(sympy.Lt)),
    "==": Operation(operator.eq, _relation(sympy.Eq)),
    "!=": Operation(operator.ne, _relation(sympy.Ne)),
    "&": Operation(operator.and_, sympy.And, False),
    "|": Operation(operator.or_, sympy.Or, False),
    "^": Operation(operator.xor, lambda a, b: (a & ~b) | (~a & b), False),
    "~": Operation(lambda a: not a if isinstance(a, bool) else ~a, sympy.Not, False),
}

# torch functions that mean an operator, by the names that reach `__torch_function__`.
TORCH_NAMES = {
    "add": "+", "sub": "-", "mul": "*", "floor_divide": "//", "remainder": "%",
    "neg": "neg", "abs": "abs",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
    "logical_and": "&", "logical_or": "|", "logical_xor": "^", "logical_not": "~",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~",
}  # fmt: skip
