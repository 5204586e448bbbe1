"""The operations that mask and score functions may use: on values, and on sympy expressions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbols import (
    SYMBOLS,
    BitAnd,
    BitOr,
    BitXor,
    Floor,
    FloorDiv,
    FloorMod,
    ShiftLeft,
    ShiftRight,
    Truncate,
)
from flashgen.tracing.indicators import product, spread
from flashgen.tracing.kinds import CONDITION, INTEGER, NUMBER
from flashgen.tracing.relations import exact, quotient, relation
from flashgen.tracing.shown import shown
from flashgen.tracing.signs import most
from flashgen.tracing.user_code import mistake


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        concrete: on Python numbers and torch tensors.
        symbolic: on sympy expressions.
        takes: the kind of every operand; an integer is a number too.
        divides: whether `symbolic` takes the symbols of integers above 0 as its last argument.
    """

    concrete: Callable[..., Any]
    symbolic: Callable[..., Any]
    takes: str = NUMBER
    divides: bool = False


def _truncate(x: Any, positive: Collection[Any] = ()) -> Any:
    """X rounded towards zero; quotients of integers stay in integers, as floats would round."""
    above, below = quotient(x, positive)
    if below == 1:
        return Truncate(x)
    towards_zero = FloorDiv(above, below)
    if _is_nonnegative(above):
        return towards_zero
    return _piecewise(sympy.Ge(above, 0, evaluate=False), towards_zero, -FloorDiv(-above, below))


def _floor(x: Any, positive: Collection[Any] = ()) -> Any:
    """X rounded down; quotients of integers stay in integers, as floats would round."""
    above, below = quotient(exact(x), positive)
    return FloorDiv(above, below) if above.is_integer else Floor(x)


def _ceil(x: Any, positive: Collection[Any] = ()) -> Any:
    above, below = quotient(exact(x), positive)
    return FloorDiv(above + below - 1, below) if above.is_integer else -Floor(-x)


def _divided_down(a: Any, b: Any) -> Any:
    """``a // b``, for floats, too."""
    if a.is_integer and b.is_integer:
        return FloorDiv(a, b)
    if b == 0:
        raise mistake(f"`{shown(a)}` is divided by zero", "divide by something else")
    if b.is_Number and b.is_finite:
        a, b = (-a, -b) if b < 0 else (a, b)
        above, below = quotient(exact(a) / sympy.Rational(b))
        if above.is_integer:
            return FloorDiv(above, below)
    return Floor(a / b)


def _remainder(a: Any, b: Any) -> Any:
    """``a % b`` with the sign of b, for floats, too."""
    whole = a.is_integer and b.is_integer
    return FloorMod(a, b) if whole else a - b * _divided_down(a, b)


def _of_bools(join: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on values; two bools have another operation, as tensors of bools have."""

    def apply(a: Any, b: Any) -> Any:
        both = isinstance(a, bool) and isinstance(b, bool)
        return join(a, b) if both else otherwise(a, b)

    return apply


def _is_nonnegative(x: Any) -> bool:
    """Whether an integer consists of positions, lengths and numbers, none of them below 0."""
    if x.is_Integer:
        return bool(x >= 0)
    if isinstance(x, sympy.Abs | FloorMod) or x in SYMBOLS:
        return True
    return isinstance(x, sympy.Add | sympy.Mul) and all(map(_is_nonnegative, x.args))


def _method(name: str) -> Callable[..., Any]:
    """The tensor method of that name, or ``math``'s function for a plain number."""

    def apply(x: Any, *others: Any) -> Any:
        return getattr(x, name)(*others) if hasattr(x, name) else getattr(math, name)(x, *others)

    return apply


def _extreme(name: str, of_numbers: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """``minimum`` or ``maximum`` of two values, either of which may be a tensor."""

    def apply(a: Any, b: Any) -> Any:
        tensor, other = (a, b) if hasattr(a, "clamp") else (b, a)
        if not hasattr(tensor, "clamp"):
            return of_numbers(a, b)
        if hasattr(other, "clamp"):
            return getattr(tensor, name)(other)
        return tensor.clamp(**{"max" if of_numbers is min else "min": other})

    return apply


def _choice(when: Any, a: Any, b: Any) -> Any:
    if isinstance(when, bool):
        return a if when else b
    import torch

    return torch.where(when, a, b)


def _shifted_right(a: Any, n: Any) -> Any:
    """``a >> min(n, 31)``: a GPU leaves larger shifts of 32 bits undefined."""
    limit = most(n)
    return ShiftRight(a, n if limit is not None and limit < 32 else sympy.Min(n, 31))


def _piecewise(when: Any, a: Any, b: Any) -> Any:
    if when in (sympy.true, sympy.false):
        return a if when else b
    return sympy.Piecewise((a, when), (b, True), evaluate=False)


def _sigmoid(x: Any) -> Any:
    return x.sigmoid() if hasattr(x, "sigmoid") else 1 / (1 + math.exp(-x))


def _truncated(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return math.trunc(x)
    keeps = not x.dtype.is_floating_point and str(x.dtype) != "torch.bool"
    return x if keeps else x.long()


def _whole(name: str) -> Callable[[Any], Any]:
    """``math``'s function of that name, or the tensor method with integer results."""

    def apply(x: Any) -> Any:
        return getattr(x, name)().long() if hasattr(x, "dtype") else getattr(math, name)(x)

    return apply


OPERATIONS = {
    "+": Operation(_of_bools(operator.or_, operator.add), spread(operator.add)),
    "-": Operation(operator.sub, spread(operator.sub)),
    "*": Operation(_of_bools(operator.and_, operator.mul), spread(product)),
    "/": Operation(operator.truediv, spread(operator.truediv)),
    "**": Operation(operator.pow, operator.pow),
    "//": Operation(operator.floordiv, _divided_down),
    "%": Operation(operator.mod, _remainder),
    "<<": Operation(operator.lshift, ShiftLeft, INTEGER),
    ">>": Operation(operator.rshift, _shifted_right, INTEGER),
    "neg": Operation(operator.neg, spread(operator.neg)),
    "abs": Operation(abs, sympy.Abs),
    "minimum": Operation(_extreme("minimum", min), sympy.Min),
    "maximum": Operation(_extreme("maximum", max), sympy.Max),
    "tanh": Operation(_method("tanh"), sympy.tanh),
    "exp": Operation(_method("exp"), sympy.exp),
    "exp2": Operation(lambda x: 2.0**x, lambda x: sympy.Pow(2, x)),
    "log": Operation(_method("log"), sympy.log),
    "log2": Operation(_method("log2"), lambda x: sympy.log(x) * sympy.Float(1 / math.log(2))),
    "sqrt": Operation(_method("sqrt"), sympy.sqrt),
    "rsqrt": Operation(lambda x: x**-0.5, lambda x: x ** sympy.Rational(-1, 2)),
    "sin": Operation(_method("sin"), sympy.sin),
    "cos": Operation(_method("cos"), sympy.cos),
    "erf": Operation(_method("erf"), sympy.erf),
    "atan": Operation(_method("atan"), sympy.atan),
    "sigmoid": Operation(_sigmoid, lambda x: 1 / (1 + sympy.exp(-x))),
    "truncate": Operation(_truncated, _truncate, divides=True),
    "floor": Operation(_whole("floor"), _floor, divides=True),
    "ceil": Operation(_whole("ceil"), _ceil, divides=True),
    ">=": Operation(operator.ge, relation(sympy.Ge), divides=True),
    ">": Operation(operator.gt, relation(sympy.Gt), divides=True),
    "<=": Operation(operator.le, relation(sympy.Le), divides=True),
    "<": Operation(operator.lt, relation(sympy.Lt), divides=True),
    "==": Operation(operator.eq, relation(sympy.Eq), divides=True),
    "!=": Operation(operator.ne, relation(sympy.Ne), divides=True),
    "&": Operation(operator.and_, sympy.And, CONDITION),
    "|": Operation(operator.or_, sympy.Or, CONDITION),
    "^": Operation(operator.xor, lambda a, b: (a & ~b) | (~a & b), CONDITION),
    "~": Operation(lambda a: not a if isinstance(a, bool) else ~a, sympy.Not, CONDITION),
    "where": Operation(_choice, _piecewise),
}

COMPARISONS = frozenset((">=", ">", "<=", "<", "==", "!="))

#: The operations on conditions in place of operations on numbers, as torch has them for bools.
JOINS = {"+": sympy.Or, "*": sympy.And, "minimum": sympy.And, "maximum": sympy.Or}

#: The operations of `& | ^ ~` on integers.
BITWISE = {
    "&": Operation(operator.and_, BitAnd, INTEGER),
    "|": Operation(operator.or_, BitOr, INTEGER),
    "^": Operation(operator.xor, BitXor, INTEGER),
    "~": Operation(operator.invert, lambda a: -a - 1, INTEGER),
}
