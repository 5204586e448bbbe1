"""Comparisons without rounding: in integers where floats would round."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import sympy

from flashgen.symbols import FloorDiv, FloorMod
from flashgen.tracing.indicators import compared

#: The room that 32 bits leave beside positions.
_LARGEST_DIVISOR = 2**12
_LARGEST = 2**31

_TURNED = {sympy.Ge: sympy.Le, sympy.Le: sympy.Ge, sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt}


def relation(cls: Any) -> Callable[..., Any]:
    """A comparison that keeps the two sides as written, folded only when it is constant.

    Three kinds are rewritten: quotients of integers, which floats would round (``q / 41 >= kv``
    becomes ``q >= 41 * kv``, and ``q / n >= kv`` becomes ``q // n >= kv``, which overflows for no
    length); limits with a fraction (``q - kv < 2.5`` is ``q - kv < 3``); and conditions as numbers.
    """

    def build(a: Any, b: Any, positive: Collection[Any] = ()) -> Any:
        def told(a: Any, b: Any) -> Any:
            if a.is_Number and not b.is_Number:
                return relation(_TURNED.get(cls, cls))(b, a, positive)
            return build(a, b, positive)

        of_conditions = compared(told, a, b)
        if of_conditions is not None:
            return of_conditions
        for turned, x, other in ((cls, a, b), (_TURNED.get(cls, cls), b, a)):
            above, below = quotient(x, positive)
            if below.free_symbols and (whole := exact(other)).is_integer:
                return _quotient_compared(turned, above, below, whole)
        if a.has(sympy.Float) or b.has(sympy.Float):
            a, b = _without_floats(cls, a, b)
        (a, below_a), (b, below_b) = quotient(a), quotient(b)
        common = sympy.ilcm(below_a, below_b)
        a, b = a * (common // below_a), b * (common // below_b)
        difference = a - b
        if difference.is_number:
            return cls(difference, 0)
        return cls(a, b, evaluate=False)

    return build


def _quotient_compared(cls: Any, above: Any, below: Any, other: Any) -> Any:
    """A comparison of ``above / below`` with an integer, by the quotient rounded down or up."""
    build = relation(cls)
    if cls in (sympy.Ge, sympy.Lt):
        return build(FloorDiv(above, below), other)
    if cls in (sympy.Gt, sympy.Le):
        return build(FloorDiv(above + below - 1, below), other)
    joint = sympy.And if cls is sympy.Eq else sympy.Or
    return joint(build(FloorDiv(above, below), other), build(FloorMod(above, below), sympy.S.Zero))


def quotient(x: Any, positive: Collection[Any] = ()) -> tuple[Any, Any]:
    """Integers whose quotient is x, by numbers and positive divisors; else x and 1."""
    one = sympy.S.One
    above, below = (x, one) if x.is_integer else sympy.fraction(sympy.together(x))
    divides = all(f in positive or f.is_Integer for f in sympy.Mul.make_args(below))
    if above.is_integer and divides and (below.free_symbols or below <= _LARGEST_DIVISOR):
        return above, below
    return x, one


def _without_floats(cls: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Sides of an equivalent comparison, in integers if all but the limit is an integer.

    For an integer x, ``x < 2.5`` is ``x < 3``, ``x >= 2.5`` is ``x >= 3`` and ``x == 2.5`` never.
    """
    (rest_a, number_a), (rest_b, number_b) = _apart(a), _apart(b)
    (whole_a, below_a), (whole_b, below_b) = quotient(rest_a), quotient(rest_b)
    common = sympy.ilcm(below_a, below_b)
    limit = (number_b - number_a) * common
    if not (whole_a.is_integer and whole_b.is_integer and limit.is_finite):
        return a, b
    if cls in (sympy.Eq, sympy.Ne):
        if not limit.is_integer:
            return sympy.S.Zero, sympy.S.One
    elif cls in (sympy.Ge, sympy.Lt):
        limit = sympy.ceiling(limit)
    else:
        limit = sympy.floor(limit)
    if abs(limit) >= _LARGEST:
        return a, b
    whole_a, whole_b = whole_a * (common // below_a), whole_b * (common // below_b)
    return (whole_a - limit, whole_b) if number_b == 0 else (whole_a, whole_b + limit)


def _apart(x: Any) -> tuple[Any, Any]:
    """The terms of the sum x, with exact factors, and its constant."""
    numbers = [_exact(term) for term in sympy.Add.make_args(x) if term.is_Number]
    factors = (term.as_coeff_Mul() for term in sympy.Add.make_args(x) if not term.is_Number)
    return sympy.Add(*(_exact(c) * rest for c, rest in factors)), sympy.Add(*numbers)


def exact(x: Any) -> Any:
    """X with fractions for the floats among its terms and their factors."""
    return sympy.Add(*_apart(x))


def _exact(number: Any) -> Any:
    """A finite float as an exact fraction."""
    return sympy.Rational(number) if number.is_Float else number
