"""The operations that mask and score functions may use: on values, and on sympy expressions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.kinds import CONDITION, INTEGER, NUMBER
from flashgen.symbols import SYMBOLS, BitAnd, BitOr, BitXor, FloorDiv, FloorMod, Truncate

#: What 32 bits leave room for beside positions.
_LARGEST_DIVISOR = 2**12


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        concrete: on Python numbers and torch tensors.
        symbolic: on sympy expressions.
        takes: the kind of every operand; an integer is a number too.
        divides: whether the symbolic one takes, last, the symbols of whole numbers above 0.
    """

    concrete: Callable[..., Any]
    symbolic: Callable[..., Any]
    takes: str = NUMBER
    divides: bool = False


def _relation(cls: Any) -> Callable[..., Any]:
    """A comparison that keeps the two sides as written, folded only when it is constant.

    But for quotients of whole numbers, which floats would round: ``q / 41 >= kv`` becomes
    ``q >= 41 * kv``, and ``q / n >= kv`` becomes ``q // n >= kv``, which no length makes overflow.
    """

    def build(a: Any, b: Any, positive: Collection[Any] = ()) -> Any:
        for turned, x, other in ((cls, a, b), (_TURNED.get(cls, cls), b, a)):
            above, below = _quotient(x, positive)
            if below.free_symbols and other.is_integer:
                return _quotient_compared(turned, above, below, other)
        (a, below_a), (b, below_b) = _quotient(a), _quotient(b)
        common = sympy.ilcm(below_a, below_b)
        a, b = a * (common // below_a), b * (common // below_b)
        difference = a - b
        if difference.is_number:
            return cls(difference, 0)
        return cls(a, b, evaluate=False)

    return build


_TURNED = {sympy.Ge: sympy.Le, sympy.Le: sympy.Ge, sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt}


def _quotient_compared(cls: Any, above: Any, below: Any, other: Any) -> Any:
    """``above / below`` beside a whole number: what is rounded down, or up, decides."""
    build = _relation(cls)
    if cls in (sympy.Ge, sympy.Lt):
        return build(FloorDiv(above, below), other)
    if cls in (sympy.Gt, sympy.Le):
        return build(FloorDiv(above + below - 1, below), other)
    joint = sympy.And if cls is sympy.Eq else sympy.Or
    return joint(build(FloorDiv(above, below), other), build(FloorMod(above, below), sympy.S.Zero))


def _quotient(x: Any, positive: Collection[Any] = ()) -> tuple[Any, Any]:
    """Whole numbers that x is the quotient of, by numbers and by what is positive; else x and 1."""
    one = sympy.S.One
    above, below = (x, one) if x.is_integer else sympy.fraction(sympy.together(x))
    divides = all(f in positive or f.is_Integer for f in sympy.Mul.make_args(below))
    if above.is_integer and divides and (below.free_symbols or below <= _LARGEST_DIVISOR):
        return above, below
    return x, one


def _truncate(x: Any, positive: Collection[Any] = ()) -> Any:
    """Towards zero: a quotient of whole numbers as such, since floats would round it first."""
    above, below = _quotient(x, positive)
    if below == 1:
        return Truncate(x)
    towards_zero = FloorDiv(above, below)
    if _is_nonnegative(above):
        return towards_zero
    return _piecewise(sympy.Ge(above, 0, evaluate=False), towards_zero, -FloorDiv(-above, below))


def _is_nonnegative(x: Any) -> bool:
    """Whether a whole number is made of positions, lengths and numbers, and nothing is below 0."""
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


def _piecewise(when: Any, a: Any, b: Any) -> Any:
    if when in (sympy.true, sympy.false):
        return a if when else b
    return sympy.Piecewise((a, when), (b, True), evaluate=False)


def _sigmoid(x: Any) -> Any:
    return x.sigmoid() if hasattr(x, "sigmoid") else 1 / (1 + math.exp(-x))


def _truncated(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return math.trunc(x)
    return x if not x.dtype.is_floating_point else x.long()


OPERATIONS = {
    "+": Operation(operator.add, operator.add),
    "-": Operation(operator.sub, operator.sub),
    "*": Operation(operator.mul, operator.mul),
    "/": Operation(operator.truediv, operator.truediv),
    "**": Operation(operator.pow, operator.pow),
    "//": Operation(operator.floordiv, FloorDiv, INTEGER),
    "%": Operation(operator.mod, FloorMod, INTEGER),
    "<<": Operation(operator.lshift, lambda a, n: a * 2**n, INTEGER),
    ">>": Operation(operator.rshift, lambda a, n: FloorDiv(a, 2**n), INTEGER),
    "neg": Operation(operator.neg, operator.neg),
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
    "sigmoid": Operation(_sigmoid, lambda x: 1 / (1 + sympy.exp(-x))),
    "truncate": Operation(_truncated, _truncate, divides=True),
    ">=": Operation(operator.ge, _relation(sympy.Ge), divides=True),
    ">": Operation(operator.gt, _relation(sympy.Gt), divides=True),
    "<=": Operation(operator.le, _relation(sympy.Le), divides=True),
    "<": Operation(operator.lt, _relation(sympy.Lt), divides=True),
    "==": Operation(operator.eq, _relation(sympy.Eq), divides=True),
    "!=": Operation(operator.ne, _relation(sympy.Ne), divides=True),
    "&": Operation(operator.and_, sympy.And, CONDITION),
    "|": Operation(operator.or_, sympy.Or, CONDITION),
    "^": Operation(operator.xor, lambda a, b: (a & ~b) | (~a & b), CONDITION),
    "~": Operation(lambda a: not a if isinstance(a, bool) else ~a, sympy.Not, CONDITION),
    "where": Operation(_choice, _piecewise),
}

#: What `& | ^ ~` do where their operands are integers.
BITWISE = {
    "&": Operation(operator.and_, BitAnd, INTEGER),
    "|": Operation(operator.or_, BitOr, INTEGER),
    "^": Operation(operator.xor, BitXor, INTEGER),
    "~": Operation(operator.invert, lambda a: -a - 1, INTEGER),
}
