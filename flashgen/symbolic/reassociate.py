"""Splits an expression by what its parts vary over, and reassociates sums and products.

A part that depends on the row alone, on the column alone or on neither gets a name and is computed
once for the tile; the rest of the expression then works on names. Sums and products are
reassociated so that scalars meet scalars first and vectors vectors, and integers become floats as
vectors: ``slope * (kv_idx - q_idx)`` is one subtraction and one multiplication an element.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import sympy

from flashgen.symbolic.printer.functions import without_conditional
from flashgen.symbolic.printer.text import is_negative, negated, rank
from flashgen.symbolic.varies_over import REDUCTIONS, Axes, ToFloat, is_integral, varies_over
from flashgen.symbols import FloorDiv, FloorMod, Load, ShiftLeft, Truncate

PREFIXES = {
    Axes.SCALAR: "scalar",
    Axes.ROW: "row",
    Axes.COLUMN: "col",
    Axes.ELEMENT: "elem",
}
_KEEPING_ARGS = (
    sympy.Add, sympy.Mul, sympy.Pow, sympy.Min, sympy.Max, sympy.Piecewise, sympy.And, sympy.Or,
    sympy.Not, sympy.core.relational.Relational,
)  # fmt: skip


class Reassociation:
    """Gives names to the parts that can be computed outside the inner loop.

    Attributes:
        definitions: for each name, in an order of computation, what it varies over and its value,
            in terms of earlier names.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self.definitions: dict[Any, tuple[Axes, Any]] = {}
        self._taken = set(taken)
        self._bound: dict[Any, Any] = {}
        self._axes: dict[Any, Axes] = {}

    def result(self, expr: Any) -> Any:
        """``expr`` as the inner loop computes it: a number, an integer or a condition."""
        if is_condition(expr):
            return self._condition(expr)
        return self._whole(expr) if is_integral(expr) else self._part(expr, Axes.ELEMENT)

    def varies_over(self, expr: Any) -> Axes:
        """What ``expr``, in the user's symbols or in names, varies over."""
        return varies_over(expr, self._axes)

    def define(self, expr: Any, form: Any) -> Any:
        """A new name for ``expr``, which is computed as ``form``."""
        axes = self.varies_over(expr)
        whole = {"integer": True} if is_integral(expr) else {"real": True}
        symbol = sympy.Symbol(self._new_name(expr, axes), **whole)
        self.definitions[symbol] = (axes, form)
        self._axes[symbol] = axes
        return symbol

    def new_symbol(self, stem: str) -> Any:
        """An integer of a name of its own, which this does not define."""
        names = itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(1)))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return sympy.Symbol(name, integer=True)

    def _new_name(self, expr: Any, axes: Axes) -> str:
        """A name with the tensor that is loaded or the symbol that is converted, else a number."""
        stem = PREFIXES[axes]
        of = expr.args[0] if isinstance(expr, Load | ToFloat) else None
        if of is not None and of.is_Symbol and axes != Axes.ELEMENT:
            stem += f"_{of.name}"
        numbered = (f"{stem}_{i}" for i in itertools.count(int(stem not in PREFIXES.values())))
        names = numbered if stem in PREFIXES.values() else itertools.chain([stem], numbered)
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name

    def _bind(self, expr: Any) -> Any:
        """The name of a part that varies over less than its expression."""
        if expr.is_Symbol:
            return expr
        if expr not in self._bound:
            axes = self.varies_over(expr)
            if isinstance(expr, Load):
                form = Load(expr.args[0], *map(self._whole, expr.args[1:]))
            elif isinstance(expr, ToFloat):
                form = self._converted(expr.args[0], axes)
            elif isinstance(expr, Truncate):
                form = Truncate(self._part(expr.args[0], axes))
            else:
                form = self._form(expr, axes)
            self._bound[expr] = form if form.is_Symbol else self.define(expr, form)
        return self._bound[expr]

    def _converted(self, expr: Any, within: Axes) -> Any:
        """A non-element integer as a float: converted as a whole unless 32 bits may overflow."""
        return ToFloat(self._whole(expr)) if is_small(expr) else self._form(expr, within)

    def _part(self, expr: Any, within: Axes) -> Any:
        """``expr`` as a float in an expression that varies over ``within``."""
        if expr.is_number:
            return expr
        axes = self.varies_over(expr)
        if is_integral(expr) and axes != Axes.ELEMENT:
            scalar = within == Axes.SCALAR
            return self._converted(expr, within) if scalar else self._bind(ToFloat(expr))
        if is_integral(expr) and not isinstance(expr, Load) and expr.has(Load) and is_small(expr):
            return ToFloat(self._whole(expr))  # float32 may not hold what is loaded
        loaded = isinstance(expr, Load) and axes != Axes.ELEMENT
        return self._bind(expr) if axes != within or loaded else self._form(expr, within)

    def _form(self, expr: Any, within: Axes) -> Any:
        """The computed form of a float or a converted integer that varies over ``within``."""
        if expr.is_Symbol:
            return expr
        if expr.is_Add:
            return self._sum(expr.args, within)
        if expr.is_Mul:
            return self._product(expr.args, within)
        if expr.is_Pow:
            return self._power(expr, within)
        if isinstance(expr, sympy.Min | sympy.Max):
            return self._extreme(expr, within)
        if isinstance(expr, sympy.Piecewise):
            branches = [(self._part(v, within), self._condition(c)) for v, c in expr.args]
            return sympy.Piecewise(*branches, evaluate=False)
        if is_integral(expr) and not isinstance(expr, sympy.Abs):
            return ToFloat(self._whole(expr))
        if isinstance(expr, Load):
            return self._whole(expr)
        return expr.func(*(self._part(arg, within) for arg in expr.args))

    def _grouped(self, parts: Iterable[Any], within: Axes) -> dict[Axes, list[Any]]:
        """``parts`` by axes. Scalars join the vectors that are combined outside the element."""
        groups: dict[Axes, list[Any]] = {}
        for part in sorted(parts, key=rank):
            groups.setdefault(self.varies_over(part), []).append(part)
        vectors = [p for p in (Axes.ROW, Axes.COLUMN) if p in groups and p != within]
        if vectors and Axes.SCALAR in groups:
            groups[vectors[0]] += groups.pop(Axes.SCALAR)
        return groups

    def _sum(self, terms: Iterable[Any], within: Axes) -> Any:
        parts = []
        for axes, group in self._grouped(with_exact_differences(terms), within).items():
            if axes == within:
                parts += [self._part(term, within) for term in group]
            elif all(map(is_negative, group)):
                parts.append(negated(self._part(sympy.Add(*map(negated, group)), within)))
            else:
                parts.append(self._part(sympy.Add(*group), within))
        return sympy.Add(*sorted(parts, key=rank), evaluate=False) if len(parts) > 1 else parts[0]

    def _product(self, factors: Iterable[Any], within: Axes) -> Any:
        number = sympy.Mul(*(factor for factor in factors if factor.is_Number))
        others = [factor for factor in factors if not factor.is_Number]
        sign, number = (-1, -number) if number < 0 else (1, number)
        parts: list[Any] = []
        for axes, group in self._grouped([number, *others], within).items():
            if axes == within:
                parts += [self._part(factor, within) for factor in group]
            elif all(factor.is_number for factor in group):
                parts += group
            else:
                parts.append(self._part(sympy.Mul(*group), within))
        parts = [part for part in parts if part != 1]
        parts = ([sympy.Integer(sign)] if sign < 0 else []) + sorted(parts, key=rank)
        return sympy.Mul(*parts, evaluate=False) if len(parts) > 1 else parts[0]

    def _power(self, expr: Any, within: Axes) -> Any:
        base, exponent = expr.args
        if exponent.is_number:
            return sympy.Pow(self._part(base, within), exponent, evaluate=False)
        if base.is_number:
            return sympy.Pow(base, self._part(exponent, within), evaluate=False)
        return expr

    def _extreme(self, expr: Any, within: Axes) -> Any:
        parts: list[Any] = []
        for axes, group in self._grouped(expr.args, within).items():
            if axes == within:
                parts += [self._part(arg, within) for arg in group]
            else:
                parts.append(self._part(expr.func(*group, evaluate=False), within))
        return expr.func(*parts, evaluate=False) if len(parts) > 1 else parts[0]

    def _whole(self, expr: Any) -> Any:
        """An integer computed in integers: unchanged, except for loads."""
        if isinstance(expr, REDUCTIONS) or not expr.has(Load, Truncate):
            return expr
        if isinstance(expr, Load | Truncate) and self.varies_over(expr) != Axes.ELEMENT:
            return self._bind(expr)
        if isinstance(expr, Truncate):
            return Truncate(self._part(expr.args[0], Axes.ELEMENT))
        if isinstance(expr, Load):
            return Load(expr.args[0], *map(self._whole, expr.args[1:]))
        if isinstance(expr, sympy.Piecewise):
            branches = [(self._whole(value), self._condition(when)) for value, when in expr.args]
            return sympy.Piecewise(*branches, evaluate=False)
        return rebuilt(expr, map(self._whole, expr.args))

    def _condition(self, expr: Any) -> Any:
        """A condition; its integers stay where they are, its floats are reassociated."""
        if isinstance(expr, sympy.ITE):
            return self._condition(without_conditional(expr))
        if isinstance(expr, sympy.And | sympy.Or | sympy.Not):
            return rebuilt(expr, map(self._condition, expr.args))
        if not isinstance(expr, sympy.core.relational.Relational):
            return expr
        if is_integral(expr.lhs) and is_integral(expr.rhs):
            return rebuilt(expr, map(self._side, expr.args))
        axes = self.varies_over(expr)
        return rebuilt(expr, (self._part(side, axes) for side in expr.args))

    def _side(self, expr: Any) -> Any:
        """A side of a comparison of integers. Divisions of a row are named, to run once a row."""
        if not (expr.has(FloorDiv, FloorMod) and self.varies_over(expr) == Axes.ROW):
            return self._whole(expr)
        if expr not in self._bound:
            self._bound[expr] = self.define(expr, self._whole(expr))
        return self._bound[expr]


def is_condition(expr: Any) -> bool:
    """Whether ``expr`` is true or false rather than a number."""
    return isinstance(expr, sympy.logic.boolalg.Boolean) and not expr.is_Symbol


def is_small(expr: Any) -> bool:
    """Whether 32 bits hold an integer expression for any positions: no products, small factors."""
    if expr.is_Add:
        return all(map(is_small, expr.args))
    if expr.is_Mul:
        factor, rest = expr.as_coeff_Mul()
        return bool(abs(factor) <= 64) and not rest.is_Mul and is_small(rest)
    if isinstance(expr, sympy.Abs | sympy.Min | sympy.Max):
        return all(map(is_small, expr.args))
    return not (expr.is_Pow or isinstance(expr, ShiftLeft))


def rebuilt(expr: Any, args: Iterable[Any]) -> Any:
    """A node of ``expr``'s kind over other arguments, which sympy does not rearrange."""
    args = tuple(args)
    if args == expr.args:
        return expr
    return expr.func(*args, **({"evaluate": False} if isinstance(expr, _KEEPING_ARGS) else {}))


def replaced(expr: Any, names: dict[Any, Any]) -> Any:
    """``expr`` with names for some of its parts; unchanged without such parts."""
    if expr in names:
        return names[expr]
    return rebuilt(expr, (replaced(arg, names) for arg in expr.args)) if expr.args else expr


def with_exact_differences(terms: Iterable[Any]) -> list[Any]:
    """Terms of a sum; integers with a common float factor are added before they are multiplied.

    ``0.1 * kv_idx - 0.1 * q_idx``, sympy's form of ``0.1 * (kv_idx - q_idx)``, is a difference of
    large floats; the difference of the integers is exact.
    """
    terms = list(terms)
    if all(map(is_integral, terms)):
        return terms
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    rest = []
    for term in terms:
        factor, whole = _split(term)
        if whole == 1:
            rest.append(term)
        else:
            groups.setdefault(factor, []).append((term, whole))
    if sympy.Integer(1) in groups:
        numbers = [term for term in rest if term.is_Integer]
        groups[sympy.Integer(1)] += [(number, number) for number in numbers]
        rest = [term for term in rest if not term.is_Integer]
    for factor, members in groups.items():
        total = sympy.Add(*(whole for _, whole in members))
        if len(members) == 1:
            rest.append(members[0][0])
        elif factor == 1:
            rest.append(total)
        else:
            rest.append(sympy.Mul(*sympy.Mul.make_args(factor), total, evaluate=False))
    return rest


def _split(term: Any) -> tuple[Any, Any]:
    """``term`` as (float factor, integer factor); the sign goes with the integer."""
    number, rest = term.as_coeff_Mul()
    factors = sympy.Mul.make_args(rest)
    whole = [factor for factor in factors if is_integral(factor)]
    if number.is_Integer:
        whole.append(number)
        number = sympy.Integer(1)
    elif number < 0 and whole:
        whole.append(sympy.Integer(-1))
        number = -number
    if all(factor.is_Integer for factor in whole):
        return term, sympy.Integer(1)
    floats = [factor for factor in factors if not is_integral(factor)]
    return sympy.Mul(number, *floats), sympy.Mul(*whole)
