"""Source text: operands, numbers, and the order of terms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import sympy

from flashgen.symbols import SYMBOLS


class Operand(str):
    """Text that can be an operand of anything: a name, a number, a call, ``(...)``."""

    __slots__ = ()


def closed(text: str) -> Operand:
    """``text`` in parentheses, where it needs them to be an operand."""
    return text if isinstance(text, Operand) else Operand(f"({text})")


def called(function: str, *arguments: object) -> Operand:
    """The call of a function."""
    return Operand(f"{function}({', '.join(map(str, arguments))})")


def joined(operator: str, operands: Iterable[str]) -> str:
    """Operands with an operator between them; a single operand stays one."""
    first, *others = operands
    return operator.join((first, *others)) if others else first


def number_text(number: Any) -> str:
    """A real constant, as the nearest float; a whole number without a point."""
    if not number.is_finite:
        raise TypeError(f"the printer knows finite numbers only: {number}")
    value = int(number) if number.is_Integer else float(number)
    text = repr(value).replace("e+", "e")  # in the notation of formatters
    return text if value < 0 else Operand(text)


def as_fraction(number: Any) -> tuple[Any, Any]:
    """``number`` as (numerator, denominator), where a person would write it as a quotient.

    A float equal to 1 / n is a quotient if it has more than eight digits: 0.03333333333333333,
    sympy's form of ``x / 30.0``, but not 0.125.
    """
    if number.is_Rational and (float(number) != number or len(repr(float(number))) > 10):
        return sympy.Integer(number.p), sympy.Integer(number.q)
    if number.is_Float and 0 < abs(number) < 1 and len(repr(float(number))) > 10:
        inverse = round(1 / float(number))
        if 1 / inverse == float(number):
            return sympy.Integer(1 if inverse > 0 else -1), sympy.Integer(abs(inverse))
    return number, sympy.Integer(1)


def is_negative(term: Any) -> bool:
    """Whether a term of a sum stands behind a minus sign."""
    return bool(term.as_coeff_Mul()[0] < 0)


def negated(expr: Any) -> Any:
    """``-expr``. A product keeps its factors as they stand."""
    if not expr.is_Mul:
        return -expr
    coefficient, *rest = expr.args
    if not coefficient.is_Number:
        return -expr
    coefficient = -coefficient
    if coefficient == 1:
        return rest[0] if len(rest) == 1 else sympy.Mul(*rest, evaluate=False)
    return sympy.Mul(coefficient, *rest, evaluate=False)


@lru_cache(maxsize=4096)  # cached: every print sorts again, and sympy prints slowly
def rank(term: Any) -> tuple[bool, bool, int, str]:
    """The sort key of a factor or a term: numbers last, then by sign, then by symbol."""
    places = [SYMBOLS.index(s) if s in SYMBOLS else len(SYMBOLS) for s in term.free_symbols]
    return (bool(term.is_Number), is_negative(term), min(places, default=0), str(term))
