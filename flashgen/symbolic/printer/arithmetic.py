"""Rules that print sums, products, quotients and powers, of integers and of floats."""

from __future__ import annotations

import math
from typing import Any

import sympy

from flashgen.symbolic.printer.core import Printer
from flashgen.symbolic.printer.text import (
    Operand,
    as_fraction,
    closed,
    is_negative,
    joined,
    negated,
    rank,
)
from flashgen.symbolic.varies_over import SCORES, is_integral
from flashgen.symbols import SCORE, BitAnd, BitOr, BitXor, ShiftLeft, ShiftRight

# Bit operations bind more loosely than a sum; a sum behind a minus sign needs parentheses too.
_BITS = BitAnd | BitOr | BitXor | ShiftLeft | ShiftRight
_LOOSER = sympy.Add | _BITS


def print_sum(printer: Printer, expr: Any) -> str:
    """Prints the `ordered_terms` of a sum."""
    terms = ordered_terms(expr)
    write = printer.matching(expr)
    text = closed(write(terms[0])) if isinstance(terms[0], _BITS) else write(terms[0])
    for term in terms[1:]:
        negative = is_negative(term)
        term = negated(term) if negative else term
        written = closed(write(term)) if isinstance(term, _LOOSER) else write(term)
        text += f" - {written}" if negative else f" + {written}"
    return text


def ordered_terms(expr: Any) -> list[Any]:
    """The terms: positive ones first, by `SYMBOLS` within a sign, the score ahead, numbers last."""
    terms = list(expr.args)
    if not is_integral(expr):
        terms = _with_one_integer(terms)
    terms.sort(
        key=lambda term: (term.is_Number, is_negative(term), not _has_score(term), rank(term))
    )
    if is_negative(terms[0]) and terms[-1].is_Number and terms[-1] > 0:
        terms = [terms[-1], *terms[:-1]]
    return terms


def _has_score(term: Any) -> bool:
    return not term.free_symbols.isdisjoint((SCORE, SCORES))


def _with_one_integer(terms: list[Any]) -> list[Any]:
    """Joins the integer terms of a float sum: their sum is exact, and converted once."""
    whole = [term for term in terms if is_integral(term) and not term.is_Integer]
    if len(whole) < 2:
        return terms
    return [term for term in terms if term not in whole] + [sympy.Add(*whole, evaluate=False)]


def print_product(printer: Printer, expr: Any) -> str:
    """Prints factors in the order of `SYMBOLS`, a number first, float denominators after ``/``."""
    if is_negative(expr):
        return f"-{printer.operand(negated(expr))}"
    factors = list(sympy.Mul.make_args(expr))
    if is_integral(expr):
        return joined(" * ", map(printer.operand, _ordered(factors)))
    factors = _with_one_integer_factor(factors)
    above = [factor for factor in factors if not _is_denominator(factor)]
    below = [_inverse(factor) for factor in factors if _is_denominator(factor)]
    above = [factor for factor in above if not (factor.is_Float and float(factor) == 1.0)]
    numbers = [factor for factor in above if factor.is_Number]
    if numbers and not printer.is_tensor(expr):
        number, denominator = as_fraction(sympy.Mul(*numbers))
        above = [factor for factor in above if not factor.is_Number]
        above += [] if number == 1 else [number]
        below += [] if denominator == 1 else [denominator]
    factors = _ordered(above, names_first=True)
    text = joined(" * ", map(printer.real_operand, factors)) if factors else Operand(1)
    if not below:
        return text
    divisor = joined(" * ", map(printer.real_operand, _ordered(below, names_first=True)))
    return f"{text} / {closed(divisor)}"


def _ordered(factors: list[Any], names_first: bool = False) -> list[Any]:
    """Numbers, then the other factors; among floats, names come before computed factors."""
    numbers = [factor for factor in factors if factor.is_number and factor != 1]
    others = [factor for factor in factors if not factor.is_number]
    numbers.sort(key=lambda number: not number.is_Number)
    if names_first:
        others.sort(key=lambda factor: (not factor.is_Symbol or is_integral(factor), rank(factor)))
    else:
        others.sort(key=rank)
    return numbers + others


def _with_one_integer_factor(factors: list[Any]) -> list[Any]:
    whole = [factor for factor in factors if is_integral(factor) and not factor.is_Integer]
    if len(whole) < 2:
        return factors
    rest = [factor for factor in factors if factor not in whole]
    return [*rest, sympy.Mul(*whole, evaluate=False)]


def _is_denominator(factor: Any) -> bool:
    """Whether a factor is 1 / something; not 1 / log(2), a number, nor 1 / sqrt(x), a function."""
    if not factor.is_Pow or factor.is_number or not factor.exp.is_Number:
        return False
    return bool(factor.exp < 0 and factor.exp != -sympy.S.Half)


def _inverse(power: Any) -> Any:
    """The x of a denominator 1 / x."""
    exponent = -power.exp
    return power.base if exponent == 1 else sympy.Pow(power.base, exponent, evaluate=False)


def print_power(printer: Printer, expr: Any) -> str:
    """Prints integer powers as products, then square roots, then other powers by the dialect."""
    base, exponent = expr.args
    if exponent.is_Float and (2 * float(exponent)).is_integer():
        exponent = sympy.Rational(int(2 * float(exponent)), 2)
    if exponent.is_Integer and exponent > 0:
        write = printer.operand if is_integral(base) else printer.real_operand
        return joined(" * ", [write(base)] * int(exponent))
    if exponent.is_Integer:
        return f"1 / {closed(print_power(printer, sympy.Pow(base, -exponent, evaluate=False)))}"
    if exponent.is_Rational and exponent.q == 2:
        return _half_power(printer, base, exponent)
    if not base.is_number:
        return printer.dialect.power(printer.real(base), printer.real(exponent))
    if base < 0:
        raise TypeError(f"the printer knows whole powers of a negative number only: {expr}")
    if base != 2:
        exponent = sympy.Float(math.log2(float(base))) * exponent
    return _call(printer, "exp2", exponent)


def _half_power(printer: Printer, base: Any, exponent: Any) -> str:
    if exponent == -sympy.S.Half:
        return _call(printer, "rsqrt", base)
    root = _call(printer, "sqrt", base)
    whole = int(abs(exponent) - sympy.S.Half)
    product = joined(" * ", [root, *[printer.real_operand(base)] * whole])
    return product if exponent > 0 else f"1 / {closed(product)}"


def _call(printer: Printer, function: str, x: Any) -> str:
    return printer.dialect.call(function, printer.real(x), printer.is_tensor(x), False)


def print_quotient(printer: Printer, expr: Any) -> str:
    """Prints ``a // b`` rounded down, for b > 0."""
    a, b = map(printer.operand, expr.args)
    if printer.dialect.floors or printer.is_nonnegative(expr.args[0]):
        return f"{a} // {b}"
    return f"({a} - ({a} % {b} + {b}) % {b}) // {b}"


def print_remainder(printer: Printer, expr: Any) -> str:
    """Prints ``a % b`` in [0, b), for b > 0."""
    a, b = map(printer.operand, expr.args)
    if printer.dialect.floors or printer.is_nonnegative(expr.args[0]):
        return f"{a} % {b}"
    return f"({a} % {b} + {b}) % {b}"


def print_bits(symbol: str) -> Any:
    """The rule for ``a & b`` and its like on integers."""

    def rule(printer: Printer, expr: Any) -> str:
        return f" {symbol} ".join(map(printer.operand, expr.args))

    return rule
