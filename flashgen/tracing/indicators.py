"""Conditions as numbers, 1 if the condition holds and else 0, and comparisons of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy

from flashgen.symbols import BitAnd, BitOr, BitXor, FloorMod
from flashgen.tracing.shown import shown
from flashgen.tracing.user_code import mistake

#: A comparison of more conditions than this stays unchanged.
_MAX_EXPANDED = 6


def is_condition(expr: Any) -> bool:
    """Whether an expression is a condition, not a number."""
    return isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol


def indicator(condition: Any) -> Any:
    """1 where the condition holds, else 0."""
    if condition in (sympy.true, sympy.false):
        return sympy.Integer(int(bool(condition)))
    return _choice(condition)


@lru_cache(maxsize=4096)  # sympy is slow to look through the condition
def _choice(condition: Any) -> Any:
    return sympy.Piecewise((1, condition), (0, True), evaluate=False)


def numbers_of(expr: Any) -> Any:
    """(condition, a, b) of a choice between two numbers, ``where(condition, a, b)``; else None."""
    if not isinstance(expr, sympy.Piecewise) or len(expr.args) != 2:
        return None
    (a, condition), (b, always) = expr.args
    return (condition, a, b) if a.is_Number and b.is_Number and always is sympy.true else None


def as_number(expr: Any) -> Any:
    """A condition as a number; a number unchanged."""
    return indicator(expr) if is_condition(expr) else expr


def is_bit(expr: Any) -> bool:
    """Whether the form of an integer shows that it is 0 or 1: ``(x >> n) & 1``, ``x % 2``."""
    if isinstance(expr, BitAnd):
        return any(arg == 1 or is_bit(arg) for arg in expr.args)
    if isinstance(expr, BitOr | BitXor):
        return all(map(is_bit, expr.args))
    if isinstance(expr, FloorMod):
        return bool(expr.args[1] == 2)
    choice = numbers_of(expr)
    return choice is not None and set(choice[1:]) <= {0, 1}


def condition_of(expr: Any) -> Any:
    """The condition that a number of 0 and 1 is 1."""
    choice = numbers_of(expr)
    if choice is None:
        return sympy.Ne(expr, 0, evaluate=False)
    condition, a, b = choice
    return chosen(condition, sympy.true if a else sympy.false, sympy.true if b else sympy.false)


def spread(of: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that turns a number and a choice between two into a choice between two numbers.

    ``(1 - c) * -10000.0`` is then ``where(c, 0, -10000.0)``. In sympy's multiplied-out form,
    the two numbers would absorb the terms that they are added to.
    """

    def apply(*operands: Any) -> Any:
        choices = [numbers_of(x) for x in operands]
        others = [x for x, choice in zip(operands, choices, strict=True) if choice is None]
        if len(others) != len(operands) - 1 or not all(x.is_Number for x in others):
            return of(*operands)
        (condition,) = (choice[0] for choice in choices if choice is not None)
        pairs = [
            choice[1:] if choice else (x, x) for x, choice in zip(operands, choices, strict=True)
        ]
        a, b = (of(*each) for each in zip(*pairs, strict=True))
        if sympy.zoo in (a, b):
            raise mistake(
                f"`{shown(operands[1])}` may be 0 and divides", "divide by something else"
            )
        if sympy.nan in (a, b):
            raise mistake(
                f"`{shown(condition)}` as a number, 1 or 0, makes NaN of an infinite one",
                "write where(condition, a, b) of what it is to be",
            )
        return sympy.Piecewise((a, condition), (b, True), evaluate=False)

    return apply


def product(a: Any, b: Any) -> Any:
    """``a * b``; for two conditions as numbers, the number of their conjunction."""
    choices = numbers_of(a), numbers_of(b)
    if any(choice is None or choice[1:] != (1, 0) for choice in choices):
        return a * b
    return indicator(sympy.And(*(condition for condition, _, _ in choices)))


def chosen(condition: Any, a: Any, b: Any) -> Any:
    """The condition that is ``a`` where ``condition`` holds, else ``b``, without redundant parts.

    sympy's And and Or fold true and false.
    """
    if a == b:
        return a
    if a is sympy.true:
        return condition | b
    if b is sympy.true:
        return ~condition | a
    return (condition & a) | (~condition & b)


def compared(relation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """``relation(a, b)`` by the conditions in it; None without conditions, or with other terms.

    A side that is a condition itself is split into its two values, whatever the other side is.
    Numbers made of conditions, as in ``a + b > 1``, are split if nothing else decides.
    """
    if is_condition(a):
        return chosen(a, relation(sympy.S.One, b), relation(sympy.S.Zero, b))
    if is_condition(b):
        return chosen(b, relation(a, sympy.S.One), relation(a, sympy.S.Zero))
    found = list(dict.fromkeys((*_outermost(a), *_outermost(b))))
    if not 0 < len(found) <= _MAX_EXPANDED:
        return None
    stands_for = {number: sympy.Dummy(integer=number.is_integer) for number in found}
    a, b = a.xreplace(stands_for), b.xreplace(stands_for)
    if not a.free_symbols | b.free_symbols <= set(stands_for.values()):
        return None

    def expanded(at: int, a: Any, b: Any) -> Any:
        if at == len(found):
            return relation(a, b)
        symbol = stands_for[found[at]]
        condition, *values = numbers_of(found[at])
        ways = (
            expanded(at + 1, a.xreplace({symbol: value}), b.xreplace({symbol: value}))
            for value in values
        )
        return chosen(condition, *ways)

    return expanded(0, a, b)


def _outermost(expr: Any) -> list[Any]:
    """The outermost choices of numbers in an expression, in order."""
    if numbers_of(expr) is not None:
        return [expr]
    return [found for arg in expr.args for found in _outermost(arg)]
