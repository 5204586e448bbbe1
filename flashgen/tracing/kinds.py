"""The kinds of symbolic values: integer, number and condition, and the checks of operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.symbols import Load
from flashgen.tracing.indicators import as_number, is_condition
from flashgen.tracing.shown import shown
from flashgen.tracing.signs import LEAST, at_least, most
from flashgen.tracing.user_code import mistake

INTEGER, NUMBER, CONDITION = "integer", "number", "condition"


def kind_of(sym: Any) -> str:
    """The kind of a sympy expression."""
    if is_condition(sym):
        return CONDITION
    return INTEGER if sym.is_integer else NUMBER


def check_kinds(name: str, takes: str, operands: list[Any]) -> None:
    """Raises MaskError if an operation cannot take these operands.

    Args:
        name: the operation's name.
        takes: the kind of its operands; an integer is a number too.
        operands: sympy expressions.
    """
    if name == "where":
        _check_choice(*operands)
        return
    for operand in operands:
        kind = kind_of(operand)
        if name in ("-", "neg") and kind == CONDITION:
            raise mistake(
                f"`-` was given the condition `{shown(operand)}`, of which torch takes none",
                "write ~ for the opposite, ^ for what differs, or where(c, 1, 0) for a number",
            )
        if takes == CONDITION and kind != CONDITION:
            raise mistake(
                f"`{name}` takes conditions and was given the {kind} `{shown(operand)}`",
                "compare it first, as in `x != 0`; comparisons beside & and | need parentheses",
            )
        if takes == INTEGER and kind == NUMBER:
            raise mistake(
                f"`{name}` takes whole numbers and was given `{shown(operand)}`",
                "write / for a quotient with a fraction, and .int() to cut one off",
            )
    operands = [as_number(operand) for operand in operands]
    if name == "**":
        _check_power(*operands)
    if name == "/" and operands[1] == 0:
        raise mistake(f"`{shown(operands[0])}` is divided by zero", "divide by something else")


def _check_power(base: Any, exponent: Any) -> None:
    """Refuses powers that may have no value, or no slope at a base of 0 for a learned exponent."""
    if exponent.is_number or (base.is_number and base > 0):
        return
    if base.is_number or (base.is_integer and exponent.is_integer) or exponent.has(Load):
        power = shown(sympy.Pow(base, exponent, evaluate=False))
        raise mistake(
            f"`{power}` is no power that kernels compute",
            "raise to a number, or a positive number to anything; of a base that is always above "
            "0 write exp2(exponent * log2(base))",
        )


def _check_choice(when: Any, a: Any, b: Any) -> None:
    if kind_of(when) != CONDITION:
        raise mistake(f"`where` was given `{shown(when)}` to decide by", "give it a comparison")
    if (kind_of(a) == CONDITION) != (kind_of(b) == CONDITION):
        raise mistake(
            f"`where` chooses between `{shown(a)}` and `{shown(b)}`",
            "give it two numbers or two conditions",
        )


def check_size(name: str, operands: list[Any]) -> None:
    """Raises MaskError for a number, among integers, that does not fit the bits of kernels."""
    if not all(operand.is_integer for operand in operands):
        return
    for number in operands:
        if number.is_Integer and not -(2**31) <= number < 2**31:
            raise mistake(
                f"`{name}` was given {number}, and kernels compute whole numbers in 32 bits",
                "write a number from -2**31 to before 2**31",
            )


def check_shift(name: str, a: Any, n: Any, least: Mapping[Any, int]) -> None:
    """Raises MaskError for a shift that 32 bits do not hold, or may not hold.

    Args:
        name: ``"<<"`` or ``">>"``.
        a: the operand that is shifted, a sympy expression.
        n: the number of bits.
        least: the least values of parameters, by their symbols.
    """
    if not at_least(n, 0, {**LEAST, **least}):
        raise mistake(
            f"`{name}` shifts by `{shown(n)}`, which is not known to be 0 or more",
            "shift by x % 32 or by maximum(x, 0)",
        )
    limit = most(n)
    if name == ">>":
        return
    if limit is None and n.has(Load):
        raise mistake(
            f"`<<` shifts by `{shown(n)}`, of which no largest value is known",
            "shift by x % 16 or by minimum(x, 30)",
        )
    if limit is not None and (abs(a) if a.is_Integer else 1) << limit >= 2**31:
        raise mistake(
            f"`{shown(a)} << {shown(n)}` needs more than the 31 bits of a whole number here",
            "shift by less, or the other side to the right: (x >> n) & 1 is the bit n of x",
        )


def check_divisor(divisor: Any, least: Mapping[Any, int]) -> None:
    """Raises MaskError for a divisor that is not known to be positive.

    Args:
        divisor: a sympy expression.
        least: the least values of parameters in it, by their symbols.
    """
    if not at_least(divisor, 1, {**LEAST, **least}):
        raise mistake(
            f"the divisor `{shown(divisor)}` is not known to be positive",
            "divide by a positive number, by an Int declared with min=1, or by maximum(x, 1)",
        )
