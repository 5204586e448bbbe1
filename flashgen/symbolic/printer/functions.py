"""Rules that print functions, choices, conditions and elements of tensors."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.symbolic.printer.core import Printer
from flashgen.symbolic.printer.text import called, rank
from flashgen.symbolic.varies_over import is_integral
from flashgen.symbols import Floor

COMPARISONS = {
    sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "==", sympy.Ne: "!=",
}  # fmt: skip
#: Functions of a float.
FUNCTIONS = {
    sympy.exp: "exp", sympy.log: "log", sympy.tanh: "tanh", sympy.sin: "sin", sympy.cos: "cos",
    sympy.erf: "erf", sympy.atan: "atan", Floor: "floor",
}  # fmt: skip


def print_function(printer: Printer, expr: Any) -> str:
    """``exp(x)`` and the other functions of a float."""
    x = expr.args[0]
    name = FUNCTIONS[expr.func]
    return printer.dialect.call(name, printer.real(x), printer.is_tensor(x), printer.approximate)


def print_absolute(printer: Printer, expr: Any) -> str:
    """``|x|``, of an integer or a float."""
    x = expr.args[0]
    return printer.dialect.call("abs", printer.text(x), printer.is_tensor(x), False)


def print_extreme(printer: Printer, expr: Any) -> str:
    """``min(a, b)`` and ``max(a, b)`` of two at a time, numbers first, then the simplest."""
    name = "min" if isinstance(expr, sympy.Min) else "max"
    first, *rest = sorted(
        expr.args, key=lambda arg: (not arg.is_Number, arg.count_ops(), rank(arg))
    )
    inner = rest[0] if len(rest) == 1 else expr.func(*rest, evaluate=False)
    tensors = (printer.is_tensor(first), printer.is_tensor(inner))
    real = not is_integral(expr)
    a, b = (_part(printer, part, real) for part in (first, inner))
    return printer.dialect.extreme(name, a, b, tensors, real)


def _part(printer: Printer, expr: Any, real: bool) -> str:
    """A part of a choice, as a float if the choice is real."""
    text = printer.real(expr) if real else printer.text(expr)
    return f"{text}.0" if real and expr.is_Integer and printer.dialect.types_numbers else text


def print_select(printer: Printer, expr: Any) -> str:
    """A choice by conditions, tested in order; the last one always holds."""
    *branches, (otherwise, always) = expr.args
    if always is not sympy.true:
        raise TypeError(f"the printer knows choices with a last resort only: {expr}")
    real = not is_integral(expr)
    text, tensor = _part(printer, otherwise, real), printer.is_tensor(otherwise)
    for value, when in reversed(branches):
        tensors = (printer.is_tensor(when), printer.is_tensor(value), tensor)
        value_text = _part(printer, value, real)
        text = printer.dialect.select(printer.text(when), value_text, text, tensors, real)
        tensor = any(tensors)
    return text


def print_comparison(printer: Printer, expr: Any) -> str:
    """``a >= b``, in the direction that the expression has."""
    write = printer.matching(expr.lhs, expr.rhs)
    return f"{write(expr.lhs)} {COMPARISONS[expr.func]} {write(expr.rhs)}"


def print_junction(printer: Printer, expr: Any) -> str:
    """``(a) & (b)``: the simplest first, since sympy keeps no order of its own."""
    joint = " & " if isinstance(expr, sympy.And) else " | "
    parts = sorted(expr.args, key=lambda part: (part.count_ops(), str(part)))
    return joint.join(map(printer.operand, parts))


def print_opposite(printer: Printer, expr: Any) -> str:
    """``~condition``."""
    condition = expr.args[0]
    return printer.dialect.invert(printer.text(condition), printer.is_tensor(condition))


def print_conditional(printer: Printer, expr: Any) -> str:
    """A choice between conditions: sympy's form of a comparison with a choice inside."""
    return printer.text(without_conditional(expr))


def without_conditional(expr: Any) -> Any:
    """A choice between two conditions, ``ITE(when, a, b)``, written with And, Or and Not."""
    when, a, b = expr.args
    return sympy.Or(sympy.And(when, a), sympy.And(sympy.Not(when), b))


def print_load(printer: Printer, expr: Any) -> str:
    """An element of a declared tensor."""
    tensor, *indices = expr.args
    if not all(map(is_integral, indices)):
        raise TypeError(f"the printer knows whole indices only: {expr}")
    return printer.dialect.load(
        printer.text(tensor), [printer.text(index) for index in indices], is_integral(expr)
    )


def print_truncated(printer: Printer, expr: Any) -> str:
    """A float without its fraction, as an integer."""
    x = expr.args[0]
    return printer.dialect.to_integer(printer.real(x), printer.is_tensor(x))


def print_converted(printer: Printer, expr: Any) -> str:
    """An integer as a float."""
    return printer.converted(expr.args[0])


def print_spread(printer: Printer, expr: Any) -> str:
    """A value for each element of a tile of scores."""
    return printer.dialect.spread(printer.text(expr.args[0]))


def print_as_bits(printer: Printer, expr: Any) -> str:
    """All bits or none."""
    condition = expr.args[0]
    tensors = (printer.is_tensor(condition), False, False)
    return printer.dialect.select(printer.text(condition), "-1", "0", tensors, False)


def print_bits_of(function: str) -> Any:
    """The rule for the bits of a comparison: a call of a function of the kernel's module."""

    def rule(printer: Printer, expr: Any) -> str:
        return called(function, *map(printer.text, expr.args))

    return rule


def print_other_bits(printer: Printer, expr: Any) -> str:
    """``~bits``."""
    return f"~{printer.operand(expr.args[0])}"


def print_reduction(name: str) -> Any:
    """The rule for the least or the greatest over the rows of a tile."""

    def rule(printer: Printer, expr: Any) -> str:
        return printer.dialect.reduce(name, printer.over_rows().text(expr.args[0]))

    return rule
