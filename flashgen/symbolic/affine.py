"""Affine integer expressions, and systems of ``expression >= 0``.

One algorithm carries everything that flashgen derives about a mask: Fourier-Motzkin elimination.
Eliminating a symbol from a system projects its solutions onto the other symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Any

import sympy


@cache
def _text(term: Any) -> str:
    """The text by which terms are sorted; cached, because sympy prints slowly."""
    return str(term)


@dataclass(frozen=True)
class Affine:
    """``const + sum(coefficient * term)`` with integer coefficients.

    A term is a symbol, or any expression free of q_idx and kv_idx that is not affine itself
    (``left * q_len``, ``left // 2``) and is treated as a symbol. Terms are sorted by text.
    """

    terms: tuple[tuple[Any, int], ...] = ()
    const: int = 0

    @classmethod
    def of(cls, coefficients: dict[Any, int], const: int) -> Affine:
        """An affine expression from coefficients by term; zero coefficients are dropped."""
        kept = ((term, c) for term, c in coefficients.items() if c)
        return cls(tuple(sorted(kept, key=lambda item: _text(item[0]))), const)

    @cached_property
    def coefficients(self) -> dict[Any, int]:
        """The coefficient of each term."""
        return dict(self.terms)

    def coefficient(self, term: Any) -> int:
        """The factor on ``term``, 0 where it does not occur."""
        return self.coefficients.get(term, 0)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.const + other)
        total = dict(self.coefficients)
        for term, c in other.terms:
            total[term] = total.get(term, 0) + c
        return Affine.of(total, self.const + other.const)

    def __mul__(self, factor: int) -> Affine:
        return Affine.of({term: factor * c for term, c in self.terms}, factor * self.const)

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -other

    def without(self, term: Any) -> Affine:
        """The expression without ``term``."""
        return Affine(tuple(item for item in self.terms if item[0] != term), self.const)

    def substitute(self, term: Any, value: Affine) -> Affine:
        """``term`` replaced by ``value``."""
        return self.without(term) + value * self.coefficient(term)

    def tightened(self) -> Affine:
        """The strongest equivalent of ``self >= 0`` over the integers: divided by the gcd."""
        divisor = gcd(*(c for _, c in self.terms))
        if divisor <= 1:
            return self
        return Affine(tuple((t, c // divisor) for t, c in self.terms), self.const // divisor)

    def negated(self) -> Affine:
        """``not (self >= 0)`` over the integers, which is ``-self - 1 >= 0``."""
        return -self - 1

    def to_sympy(self) -> Any:
        """The affine form as a sympy expression."""
        return sympy.Add(*(c * term for term, c in self.terms), self.const)


def symbol(term: Any) -> Affine:
    """One symbol as an affine expression."""
    return Affine(((term, 1),), 0)


def summands(expr: Any) -> Iterator[Any]:
    """The terms of a sum, with products of sums multiplied out. Functions stay as they are."""
    if expr.is_Add:
        for arg in expr.args:
            yield from summands(arg)
    elif expr.is_Mul and any(arg.is_Add for arg in expr.args):
        inner = next(arg for arg in expr.args if arg.is_Add)
        rest = sympy.Mul(*(arg for arg in expr.args if arg is not inner))
        for arg in inner.args:
            yield from summands(arg * rest)
    elif expr.is_Pow and expr.base.is_Add and expr.exp.is_Integer and expr.exp > 0:
        for arg in sympy.expand_multinomial(expr, deep=False).args:
            yield from summands(arg)
    else:
        yield expr


def linearise(expr: Any, variables: frozenset[Any] = frozenset()) -> Affine | None:
    """``expr`` as an affine expression, or None where it is not affine in ``variables``."""
    coefficients: dict[Any, int] = {}
    const = 0
    for part in summands(expr):
        factor, term = part.as_coeff_Mul()
        if not factor.is_Integer:
            return None
        if term == 1:
            const += int(factor)
        elif term in variables or not term.free_symbols & variables:
            coefficients[term] = coefficients.get(term, 0) + int(factor)
        else:
            return None
    return Affine.of(coefficients, const)


def eliminate(system: Iterable[Affine], term: Any) -> tuple[list[Affine], list[Affine]]:
    """Project the solutions of ``system`` along ``term`` (one Fourier-Motzkin step).

    Each lower bound ``a*x + p >= 0`` (a > 0) meets each upper bound ``-b*x + r >= 0`` (b > 0): some
    rational x lies between them exactly when ``b*p + a*r >= 0``. Some integer does whenever a == 1
    or b == 1, since one of the two bounds is then an integer itself; otherwise it surely does when
    ``b*p + a*r >= (a - 1) * (b - 1)``.

    Returns:
        The projection, and the doubts: where every doubt is >= 0 the projection is exact over the
        integers, elsewhere it may be too large.
    """
    lower: list[Affine] = []
    upper: list[Affine] = []
    rest: list[Affine] = []
    doubts: list[Affine] = []
    for atom in system:
        c = atom.coefficient(term)
        (lower if c > 0 else upper if c < 0 else rest).append(atom)
    for low in lower:
        for high in upper:
            a, b = low.coefficient(term), -high.coefficient(term)
            shadow = low.without(term) * b + high.without(term) * a
            rest.append(shadow.tightened())
            if a > 1 and b > 1:
                doubts.append(shadow - (a - 1) * (b - 1))
    return rest, doubts
