"""Source text of a sympy expression, for a Triton kernel or for eager PyTorch.

Strict: a node that is not listed is an error, never a guess. Integer arithmetic stays integer,
conditions print with ``&`` and ``|`` and full parentheses, and terms come in the order that a
person writes: positions, then lengths and parameters, then the constant.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbols import SYMBOLS, FloorDiv, FloorMod

_NONNEGATIVE = frozenset(symbol.name for symbol in SYMBOLS)
_COMPARISONS = {
    sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "==", sympy.Ne: "!=",
}  # fmt: skip
_ATOMIC = re.compile(r"[\w.]+(\[[^\[\]]*\]|\([^()]*\))?")


def triton_source(
    expr: Any, names: Mapping[str, str] | None = None, nonnegative: Collection[str] = ()
) -> str:
    """``expr`` as Triton source.

    Args:
        expr: an integer or boolean sympy expression.
        names: the text for a symbol, as ``{"q_idx": "offs_m[:, None]"}``; others print their name.
        nonnegative: parameters known to be >= 0. Triton's ``//`` and ``%`` round towards zero, as
            C's do: an operand that may be negative is printed with a correction.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return _Printer(names or {}, _NONNEGATIVE | set(nonnegative), _TRITON).text(expr)


def torch_source(expr: Any, names: Mapping[str, str] | None = None) -> str:
    """``expr`` as eager PyTorch: positions are integer tensors, lengths and parameters are ints.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return _Printer(names or {}, frozenset(), _TORCH).text(expr)


@dataclass(frozen=True)
class _Dialect:
    """Where the two languages differ."""

    select: str
    absolute: str
    floors: bool


_TRITON = _Dialect(select="tl.where({when}, {a}, {b})", absolute="tl.abs({x})", floors=False)
_TORCH = _Dialect(select="({a} if {when} else {b})", absolute="abs({x})", floors=True)


@dataclass(frozen=True)
class _Printer:
    names: Mapping[str, str]
    nonnegative: frozenset[str]
    dialect: _Dialect

    def text(self, expr: Any) -> str:
        """``expr`` where no parentheses are needed around it."""
        if expr.is_Symbol:
            name = self.names.get(expr.name, expr.name)
            return name if _ATOMIC.fullmatch(name) else f"({name})"
        if expr.is_Integer:
            return str(int(expr))
        if expr in (sympy.true, sympy.false):
            return str(bool(expr))
        rule = _RULES.get(expr.func)
        if rule is None:
            raise TypeError(f"the printer does not know {expr.func.__name__}: {expr}")
        return rule(self, expr)

    def operand(self, expr: Any) -> str:
        """``expr`` as an operand of ``*``, ``//``, ``%``, ``&`` or ``|``."""
        text = self.text(expr)
        bare = expr.is_Symbol or expr in (sympy.true, sympy.false)
        call = isinstance(expr, sympy.Min | sympy.Max | sympy.Abs | sympy.Piecewise)
        return text if bare or call or text.isdigit() else f"({text})"

    def is_nonnegative(self, expr: Any) -> bool:
        """Whether ``expr`` is a sum of products of quantities that are never negative."""
        if expr.is_Symbol:
            return expr.name in self.nonnegative
        if expr.is_Integer:
            return bool(expr >= 0)
        if isinstance(expr, FloorMod | sympy.Abs):
            return True
        if isinstance(expr, FloorDiv):
            return self.is_nonnegative(expr.args[0])
        sums = sympy.Add | sympy.Mul | sympy.Pow
        return isinstance(expr, sums) and all(map(self.is_nonnegative, expr.args))

    def sum(self, expr: Any) -> str:
        """Positive terms first, each sign in the order of `SYMBOLS`, a constant last."""
        terms = sorted(expr.args, key=_rank)
        if _is_negative(terms[0]) and terms[-1].is_Integer and terms[-1] > 0:
            terms = [terms[-1], *terms[:-1]]
        text = self.term(terms[0])
        for term in terms[1:]:
            text += f" - {self.term(-term)}" if _is_negative(term) else f" + {self.term(term)}"
        return text

    def term(self, expr: Any) -> str:
        """A term of a sum: a product or a quotient needs no parentheses there."""
        return self.text(expr)

    def product(self, expr: Any) -> str:
        """Factors in the order of `SYMBOLS`, a number first."""
        factor, rest = expr.as_coeff_Mul()
        if factor < 0:
            return f"-{self.operand(-expr)}"
        factors = sorted(sympy.Mul.make_args(rest), key=_rank)
        numbers = [] if factor == 1 else [factor]
        return " * ".join(map(self.operand, numbers + factors))

    def power(self, expr: Any) -> str:
        """A power with a number above, as the product it is."""
        base, exponent = expr.args
        if not (exponent.is_Integer and exponent > 0):
            raise TypeError(f"the printer knows whole powers only: {expr}")
        return " * ".join([self.operand(base)] * int(exponent))

    def quotient(self, expr: Any) -> str:
        """``a // b`` rounded down, for b > 0."""
        a, b = map(self.operand, expr.args)
        if self.dialect.floors or self.is_nonnegative(expr.args[0]):
            return f"{a} // {b}"
        return f"({a} - ({a} % {b} + {b}) % {b}) // {b}"

    def remainder(self, expr: Any) -> str:
        """``a % b`` in [0, b), for b > 0."""
        a, b = map(self.operand, expr.args)
        if self.dialect.floors or self.is_nonnegative(expr.args[0]):
            return f"{a} % {b}"
        return f"({a} % {b} + {b}) % {b}"

    def extreme(self, expr: Any) -> str:
        """``min(a, b)`` and ``max(a, b)``, two at a time, numbers first, then the simplest."""
        name = "min" if isinstance(expr, sympy.Min) else "max"
        first, *rest = sorted(
            expr.args, key=lambda arg: (not arg.is_Integer, arg.count_ops(), _rank(arg))
        )
        inner = rest[0] if len(rest) == 1 else expr.func(*rest, evaluate=False)
        return f"{name}({self.text(first)}, {self.text(inner)})"

    def absolute(self, expr: Any) -> str:
        """``|x|``."""
        return self.dialect.absolute.format(x=self.text(expr.args[0]))

    def comparison(self, expr: Any) -> str:
        """``a >= b``, in the direction that the expression has."""
        return f"{self.text(expr.lhs)} {_COMPARISONS[expr.func]} {self.text(expr.rhs)}"

    def junction(self, expr: Any) -> str:
        """``(a) & (b)``: the simplest first, since sympy keeps no order of its own."""
        joint = " & " if isinstance(expr, sympy.And) else " | "
        parts = sorted(expr.args, key=lambda part: (part.count_ops(), str(part)))
        return joint.join(map(self.operand, parts))

    def select(self, expr: Any) -> str:
        """A value that depends on a condition."""
        (a, when), (b, otherwise) = expr.args[0], expr.args[-1]
        if len(expr.args) != 2 or otherwise is not sympy.true:
            raise TypeError(f"the printer knows two-way choices only: {expr}")
        return self.dialect.select.format(when=self.text(when), a=self.text(a), b=self.text(b))


_RULES = {
    sympy.Add: _Printer.sum,
    sympy.Mul: _Printer.product,
    sympy.Pow: _Printer.power,
    FloorDiv: _Printer.quotient,
    FloorMod: _Printer.remainder,
    sympy.Min: _Printer.extreme,
    sympy.Max: _Printer.extreme,
    sympy.Abs: _Printer.absolute,
    sympy.And: _Printer.junction,
    sympy.Or: _Printer.junction,
    sympy.Piecewise: _Printer.select,
    **dict.fromkeys(_COMPARISONS, _Printer.comparison),
}


def _is_negative(term: Any) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _rank(term: Any) -> tuple[bool, bool, int, str]:
    """Where a term stands in a sum: numbers last, then by sign, then by symbol."""
    places = [SYMBOLS.index(s) if s in SYMBOLS else len(SYMBOLS) for s in term.free_symbols]
    return (bool(term.is_Integer), _is_negative(term), min(places, default=0), str(term))
