"""What tests keep of sympy's Min and Max is what sympy finds."""

from __future__ import annotations

from itertools import product

from sympy import Integer, Max, Min, S, Symbol
from sympy.functions.elementary.miscellaneous import MinMaxBase

from support.quick_sympy import connected_by_sympy


def test_kept_comparisons_are_those_of_sympy() -> None:
    """Of terms in either order, whose symbols differ in what is known of them."""
    any_x, x = Symbol("x", integer=True), Symbol("x", integer=True, nonnegative=True)
    y = Symbol("y", integer=True, positive=True)
    terms = [
        any_x,
        x,
        y,
        x + 1,
        x + y,
        2 * x + 2,
        Integer(0),
        Integer(3),
        -y,
        x - y,
        x * y,
        S(1) / 2,
    ]
    for _ in range(2):  # when they are asked for, and when they are kept
        for a, b in product(terms, repeat=2):
            assert MinMaxBase._is_connected(a, b) == connected_by_sympy(a, b), (a, b)
    assert MinMaxBase._is_connected.__func__ is not connected_by_sympy.__func__
    assert Max(x, x + 1) == x + 1 and Min(x, x + 1) == x
    assert Max(any_x, 0) != any_x and Max(x, 0) == x
