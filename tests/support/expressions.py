"""Random masks and scores, values for their symbols, and what they come to by Python's numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import hypothesis.strategies as st
import numpy as np
import sympy

from flashgen.symbolic.varies_over import SCALE, SCORES
from flashgen.symbols import (
    KV_IDX,
    KV_LEN,
    Q_IDX,
    Q_LEN,
    B,
    BitAnd,
    BitOr,
    BitXor,
    FloorDiv,
    FloorMod,
    H,
    Load,
    ShiftLeft,
    ShiftRight,
    evaluate,
)
from support import printed

CAP, SLOPES, BIAS, TEMPERATURE = sympy.symbols("cap slopes bias temperature", real=True)
LEFT, DOC, FLAG, N = sympy.symbols("left doc flag n", integer=True)
LOG2E = 1 / sympy.log(2)

VALUES: dict[str, Any] = {
    "q_idx": printed.Q_IDX,
    "kv_idx": printed.KV_IDX,
    "batch": 1,
    "head": 2,
    "q_first": 7,
    "q_len": 12,
    "kv_len": 10,
    "left": 4,
    "n": 9,
    "cap": 2.5,
    "scale": 0.25,
    "scores": np.sin(np.arange(35.0)).reshape(5, 7) * 5,
    "slopes": np.array([0.5, 0.25, 0.125, 0.75]),
    "bias": np.cos(np.arange(80.0)).reshape(4, 20),
    "temperature": np.array([1.5, 0.5]),
    "doc": np.arange(40).reshape(2, 20) // 3 % 5,
    "flag": np.arange(30) % 2,
}


def expected_of(expr: Any, values: dict[str, Any]) -> Any:
    """The same by sympy's own nodes, element by element, in Python's numbers."""
    rows, columns = values["q_idx"].ravel(), values["kv_idx"].ravel()
    plain = {
        name: value.astype(object) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    named = {**plain, "b": values["batch"], "h": values["head"]}
    return np.array(
        [
            evaluate(
                expr,
                {
                    **named,
                    "q_idx": int(q),
                    "kv_idx": int(k),
                    "scores": float(values["scores"][i, j]),
                },
            )
            for (i, q), (j, k) in product(enumerate(rows), enumerate(columns))
        ]
    ).reshape(len(rows), len(columns))


def integers(depth: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.sampled_from([Q_IDX, KV_IDX, B, H, Q_LEN, KV_LEN, LEFT]),
        st.integers(-4, 4).map(sympy.Integer),
    )
    if depth == 0:
        return leaves
    inner = integers(depth - 1)
    return st.one_of(
        leaves,
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(FloorDiv, inner, st.integers(1, 4).map(sympy.Integer)),
        st.builds(FloorMod, inner, st.integers(1, 4).map(sympy.Integer)),
        st.builds(BitAnd, inner, inner),
        st.builds(BitOr, inner, inner),
        st.builds(BitXor, inner, inner),
        st.builds(lambda a, n: ShiftLeft(a, FloorMod(n, 4)), inner, inner),
        st.builds(lambda a, n: ShiftRight(a, FloorMod(n, 4)), inner, inner),
        st.builds(sympy.Abs, inner),
        st.builds(sympy.Min, inner, inner),
        st.builds(sympy.Max, inner, inner),
        st.builds(lambda i: Load(DOC, FloorMod(i, 2), FloorMod(i, 20)), inner),
        st.builds(choice, conditions(integers(0)), inner, inner),
    )


def conditions(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    relations = st.sampled_from([sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne])
    compared = st.builds(lambda r, a, b: r(a, b), relations, numbers, numbers)
    loaded = st.builds(
        lambda i: sympy.Ne(Load(FLAG, FloorMod(i, 30)), 0, evaluate=False), integers(0)
    )
    atoms = st.one_of(compared, loaded)
    return st.one_of(
        atoms, st.builds(sympy.And, atoms, atoms), st.builds(sympy.Or, atoms, atoms),
        st.builds(sympy.Not, st.builds(sympy.And, atoms, atoms)),
    )  # fmt: skip


def choice(when: Any, a: Any, b: Any) -> Any:
    if when in (sympy.true, sympy.false):
        return a if when else b
    return sympy.Piecewise((a, when), (b, True), evaluate=False)


def reals(depth: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.sampled_from([SCORES, SCALE, CAP, Load(SLOPES, H), LOG2E]),
        st.sampled_from([0.5, -1.5, 0.1, 3.0]).map(sympy.Float),
        st.sampled_from([sympy.Rational(1, 3), sympy.Rational(-5, 2)]),
        integers(1),
    )
    if depth == 0:
        return leaves
    inner = reals(depth - 1)
    return st.one_of(
        leaves,
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, b: a / (1 + sympy.Abs(b)), inner, inner),
        st.builds(sympy.tanh, inner),
        st.builds(sympy.sin, inner),
        st.builds(sympy.erf, inner),
        st.builds(lambda x: sympy.exp(-sympy.Abs(x)), inner),
        st.builds(lambda x: sympy.log(1 + sympy.Abs(x)), inner),
        st.builds(lambda x: sympy.sqrt(1 + sympy.Abs(x)), inner),
        st.builds(lambda x: 1 / sympy.sqrt(1 + sympy.Abs(x)), inner),
        st.builds(lambda x: 2 ** sympy.tanh(x), inner),
        st.builds(lambda x: sympy.Abs(x) ** sympy.Float(0.3), inner),
        st.builds(lambda x, y: (1 + sympy.Abs(x)) ** sympy.tanh(y), inner, inner),
        st.builds(lambda x: 1 / (1 + sympy.exp(-sympy.tanh(x))), inner),
        st.builds(sympy.Min, inner, inner),
        st.builds(sympy.Max, inner, inner),
        st.builds(
            lambda i, j: Load(BIAS, FloorMod(i, 4), FloorMod(j, 20)), integers(1), integers(1)
        ),
        st.builds(choice, conditions(reals(0)), inner, inner),
    )
