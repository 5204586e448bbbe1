"""The score in the form that a softmax in base 2 needs, and the mask inside a score function."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.reassociate import with_exact_differences
from flashgen.symbolic.varies_over import SCALE, SCORES, Axes, is_integral, varies_over
from flashgen.symbols import KV_IDX, Q_FIRST, Q_IDX, SCORE, Load
from flashgen.tracing.shown import shown

#: log2(e): exact in sympy, printed as 1.4426950408889634.
LOG2E = 1 / sympy.log(2)

_INFINITIES = (sympy.oo, -sympy.oo, sympy.nan, sympy.zoo)
#: A number of a score function at or below this is -inf: scaled, float32 may not hold it in base 2.
_LEAST = sympy.Float(-1e20)


@dataclass(frozen=True)
class FoldedScore:
    """A score function of the raw products q·k, for a softmax in base 2.

    A term added to a whole row does not change a softmax, and its maximum may be taken before a
    positive factor. So ``expr`` is ``outer * inner + shift``: the inner loop computes ``inner`` for
    each element, multiplies by ``outer`` in the exponential, and does not need ``shift``.

    Attributes:
        expr: log2(e) * f(scale * scores), over `SCORES` and `SCALE`.
        outer: a scalar known to be positive, for a scale above 0.
        inner: `SCORES` itself where ``expr`` is a positive multiple of it.
        shift: a term of the row alone; to be added to the log-sum-exp, and subtracted from a sink.
        factor: the scalar if ``expr`` is a scalar times `SCORES`; else None.
        factor_is_positive: whether the factor is known to be above 0, for a scale above 0.
    """

    expr: Any
    outer: Any
    inner: Any
    shift: Any
    factor: Any
    factor_is_positive: bool


def fold_score(score: Any = SCORE, positive: Collection[str] = ()) -> FoldedScore:
    """Folds the softmax scale and log2(e) into a score function, in as few operations as possible.

    Args:
        score: f over `SCORE`, the indices and parameters; without infinities (`split_infinite`).
        positive: parameters known to be above 0.
    """
    lifted = _lifted(score)
    raw = times(lifted.xreplace({SCORE: SCALE * SCORES}), LOG2E)
    slope, rest = _linear(raw)
    expr = raw if slope is None else sympy.Add(sympy.Mul(slope, SCORES), rest)
    factor = slope if rest == 0 and slope is not None and _is_scalar(slope) else None
    terms, shift = _without_shift(expr)
    # A bias may be as low as float32 allows: divided by outer it could overflow.
    outer = sympy.Integer(1) if lifted != score else _positive_factor(terms, positive)
    return FoldedScore(
        expr=expr,
        outer=outer,
        inner=sympy.Add(*(times(term, 1 / outer) for term in terms)),
        shift=shift,
        factor=factor,
        factor_is_positive=factor is not None and _is_positive(factor, positive),
    )


def may_be_infinite(expr: Any) -> bool:
    """Whether a score function, or a part of one, may be -inf because an element of a tensor is.

    A slope of -inf, times a distance, has no meaning where the distance is 0.
    """
    terms = sympy.Add.make_args(expr)
    if any(varies_over(load) != Axes.SCALAR for term in terms for load in _floats(term)):
        return True
    positions = {Q_IDX, KV_IDX, Q_FIRST, SCORE, SCORES}
    return any(_floats(term) and not positions & term.free_symbols for term in terms)


def _floats(expr: Any) -> list[Any]:
    return [load for load in expr.atoms(Load) if not load.is_integer]


def _lifted(expr: Any) -> Any:
    """A score function whose biases do not overflow when they are multiplied by log2(e).

    A bias is an element of a tensor that varies over a tile, perhaps times a number. A bias above
    -1.7e38 and a bias of -inf stay; biases between them become values near -1.7e38 and keep their
    order.
    """
    if expr.is_Add:
        return sympy.Add(*map(_lifted, expr.args))
    if isinstance(expr, sympy.Piecewise):
        return sympy.Piecewise(*((_lifted(x), when) for x, when in expr.args), evaluate=False)
    bias = expr.as_coeff_Mul()[1]
    if not isinstance(bias, Load) or bias.is_integer or varies_over(bias) == Axes.SCALAR:
        return expr
    return sympy.Max(expr, expr / 8 - sympy.Float(1.5e38))


def _is_scalar(expr: Any) -> bool:
    return varies_over(expr) == Axes.SCALAR


def _is_positive(expr: Any, positive: Collection[str]) -> bool:
    above_0 = [symbol for symbol in expr.free_symbols if symbol.name in positive]
    known = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in above_0}
    return bool(expr.xreplace(known).is_positive)


def _without_shift(expr: Any) -> tuple[list[Any], Any]:
    """The terms of ``expr`` that a softmax needs, and the sum of the terms of the row alone.

    ``slope * (kv_idx - q_idx)`` is ``slope * (kv_idx - q_first)``, of the column alone, and
    ``slope * (q_first - q_idx)``. Both are products of exact differences, no larger than the first.
    """
    kept: list[Any] = []
    shift: list[Any] = []
    for term in with_exact_differences(sympy.Add.make_args(expr)):
        if varies_over(term) in (Axes.SCALAR, Axes.ROW):
            # A term of -inf hides the row, so it has to be added to each score.
            (kept if may_be_infinite(term) else shift).append(term)
            continue
        scalars, others = _scalar_factors(term)
        whole = others[0] if len(others) == 1 else sympy.Integer(0)
        parts = sympy.Add.make_args(whole)
        rows = sympy.Add(*(part for part in parts if varies_over(part) == Axes.ROW))
        columns = [part for part in parts if varies_over(part) == Axes.COLUMN]
        mixed = any(varies_over(part) == Axes.ELEMENT for part in parts)
        if rows == 0 or not columns or mixed or not is_integral(whole):
            kept.append(term)
            continue
        first = rows.xreplace({Q_IDX: Q_FIRST})
        kept.append(sympy.Mul(*scalars, whole - rows + first, evaluate=False))
        shift.append(sympy.Mul(*scalars, rows - first, evaluate=False))
    return kept, sympy.Add(*shift)


def _scalar_factors(term: Any) -> tuple[list[Any], list[Any]]:
    """The factors of a product that are scalars, and the others."""
    factors = sympy.Mul.make_args(term)
    return [f for f in factors if _is_scalar(f)], [f for f in factors if not _is_scalar(f)]


def _positive_factor(terms: list[Any], positive: Collection[str]) -> Any:
    """The factor of the term with the product q·k, as far as it is known to be above 0."""
    for term in terms:
        if SCORES not in term.free_symbols:
            continue
        if isinstance(term, sympy.Piecewise):
            return _positive_factor([value for value, _ in term.args], positive)
        scalars, _ = _scalar_factors(term)
        return sympy.Mul(*(scalar for scalar in scalars if _is_positive(scalar, positive)))
    return sympy.Integer(1)


def times(expr: Any, factor: Any) -> Any:
    """``factor * expr``, with the factor inside sums and choices, where scalars absorb it."""
    if expr.is_Add:
        return sympy.Add(*(times(term, factor) for term in expr.args))
    if isinstance(expr, sympy.Piecewise):
        branches = [(times(value, factor), when) for value, when in expr.args]
        return sympy.Piecewise(*branches, evaluate=False)
    return sympy.Mul(factor, expr)


def _linear(raw: Any) -> tuple[Any, Any]:
    """(a, c) if ``raw`` is a * `SCORES` + c; else (None, raw)."""
    slopes, rest = [], []
    for term in sympy.Add.make_args(raw):
        slope, dependent = term.as_independent(SCORES, as_Add=False)
        if dependent == SCORES:
            slopes.append(slope)
        elif SCORES in term.free_symbols:
            return None, raw
        else:
            rest.append(term)
    return (sympy.Add(*slopes), sympy.Add(*rest)) if slopes else (None, raw)


def split_infinite(score: Any) -> tuple[Any, Any]:
    """A score function without its infinities, and the condition under which it was finite.

    ``where(c, x, -inf)``, by itself, in a sum or times a positive number, hides elements for which
    ``c`` is false: it is a mask. A number of -1e20 or below, such as torch.finfo's least, counts as
    -inf.

    Returns:
        (score, condition); the condition is ``sympy.true`` where nothing is hidden.

    Raises:
        ValueError: any other infinity, or a condition on the score itself, which a mask does not
            have. The message names the cause and what to write instead, in the user's notation.
    """
    finite, condition = _split(score)
    if SCORE in condition.free_symbols:
        raise ValueError(
            f"the score is -inf or not by its own value, as `{shown(condition)}`, and a key is "
            "hidden by positions, tensors and parameters alone; give it a low number, as "
            "where(score > 0, score, -1e9)"
        )
    for infinity in _INFINITIES:
        if finite.has(infinity) or condition.has(infinity):
            raise ValueError(
                f"the score may become {_in_words(infinity)}, which has no meaning there; "
                "hide a key with where(condition, score, -inf) as the last step, or with mask="
            )
    return finite, condition


def _in_words(infinity: Any) -> str:
    return {sympy.oo: "+inf", -sympy.oo: "-inf within a formula"}.get(infinity, "undefined")


def _hides(expr: Any) -> bool:
    return bool(expr.is_Number and expr.is_comparable and expr <= _LEAST) or expr == -sympy.oo


def _has_hiding(expr: Any) -> bool:
    """Whether a value in it hides; what a condition compares with, as nan_to_num does, is none."""
    if isinstance(expr, sympy.Piecewise):
        return any(_has_hiding(value) for value, _ in expr.args)
    return _hides(expr) or any(map(_has_hiding, expr.args))


def _split(expr: Any) -> tuple[Any, Any]:
    if _hides(expr):
        return sympy.Integer(0), sympy.false
    if not _has_hiding(expr):
        return expr, sympy.true
    if isinstance(expr, sympy.Piecewise):
        return _split_choice(expr)
    if expr.is_Add:
        parts = [_split(term) for term in expr.args]
        return sympy.Add(*(part for part, _ in parts)), sympy.And(*(when for _, when in parts))
    if expr.is_Mul:
        infinite = [factor for factor in expr.args if factor.has(-sympy.oo)]
        others = sympy.Mul(*(factor for factor in expr.args if not factor.has(-sympy.oo)))
        if len(infinite) == 1 and others.is_positive:
            finite, when = _split(infinite[0])
            return sympy.Mul(others, finite), when
    return expr, sympy.true


def _split_choice(expr: Any) -> tuple[Any, Any]:
    """The branches that are not hidden, and the condition under which one of them is taken."""
    kept: list[tuple[Any, Any]] = []
    seen: Any = sympy.false
    earlier: Any = sympy.true
    for value, when in expr.args:
        finite, visible = _split(value)
        seen = sympy.Or(seen, sympy.And(earlier, when, visible))
        earlier = sympy.And(earlier, sympy.Not(when))
        if visible is not sympy.false:
            kept.append((finite, when))
    if not kept:
        return sympy.Integer(0), sympy.false
    # The value of a hidden branch does not matter: the last visible branch replaces it.
    *branches, (last, _) = kept
    if not branches:
        return last, seen
    return sympy.Piecewise(*branches, (last, True), evaluate=False), seen
