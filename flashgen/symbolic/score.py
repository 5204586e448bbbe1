"""The score as the softmax in base 2 takes it, and the mask that may hide in a score function."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.symbolic.places import SCALE, SCORES, Place, place_of
from flashgen.symbols import SCORE

#: sympy keeps it exact; it prints as 1.4426950408889634.
LOG2E = 1 / sympy.log(2)

_INFINITIES = (sympy.oo, -sympy.oo, sympy.nan, sympy.zoo)


@dataclass(frozen=True)
class FoldedScore:
    """A score function of the raw products q·k, for a softmax in base 2.

    Attributes:
        expr: log2(e) * f(scale * scores), over `SCORES` and `SCALE`.
        factor: where ``expr`` is a scalar times `SCORES` and nothing more, that scalar; else None.
        factor_is_positive: whether the factor is known to be above 0, for a scale above 0. Only
            then is the greatest score that of the greatest product.
    """

    expr: Any
    factor: Any
    factor_is_positive: bool

    @property
    def uses_tanh(self) -> bool:
        """Whether a hyperbolic tangent is taken."""
        return bool(self.expr.has(sympy.tanh))


def fold_score(score: Any = SCORE, positive: Collection[str] = ()) -> FoldedScore:
    """Puts the softmax scale and log2(e) into a score function, in as few operations as may be.

    Args:
        score: f over `SCORE`, the indices and parameters; without infinities (`split_infinite`).
        positive: parameters known to be above 0.
    """
    raw = times(score.xreplace({SCORE: SCALE * SCORES}), LOG2E)
    slope, rest = _linear(raw)
    if slope is None:
        return FoldedScore(raw, None, False)
    expr = sympy.Add(sympy.Mul(slope, SCORES, evaluate=False), rest)
    if rest != 0 or place_of(slope) != Place.SCALAR:
        return FoldedScore(expr, None, False)
    known = {
        s: sympy.Symbol(s.name, positive=True) for s in slope.free_symbols if s.name in positive
    }
    return FoldedScore(expr, slope, bool(slope.xreplace(known).is_positive))


def times(expr: Any, factor: Any) -> Any:
    """``factor * expr``, with the factor inside sums and choices, where scalars take it up."""
    if expr.is_Add:
        return sympy.Add(*(times(term, factor) for term in expr.args))
    if isinstance(expr, sympy.Piecewise):
        branches = [(times(value, factor), when) for value, when in expr.args]
        return sympy.Piecewise(*branches, evaluate=False)
    return sympy.Mul(factor, expr)


def _linear(raw: Any) -> tuple[Any, Any]:
    """(a, c) where ``raw`` is a * `SCORES` + c; (None, raw) where it is not."""
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
    """A score function without its infinities, and the condition under which it had none.

    ``where(c, x, -inf)``, by itself, in a sum or times a positive number, hides what ``c`` does
    not hold for: it is a mask.

    Returns:
        (score, condition); the condition is ``sympy.true`` where nothing is hidden.

    Raises:
        ValueError: any other infinity. The message says what it is and what to write, in the
            user's terms.
    """
    finite, condition = _split(score)
    for infinity in _INFINITIES:
        if finite.has(infinity) or condition.has(infinity):
            raise ValueError(
                f"the score may become {_in_words(infinity)}, which has no meaning there; "
                "hide a key with where(condition, score, -inf) as the last step, or with mask="
            )
    return finite, condition


def _in_words(infinity: Any) -> str:
    return {sympy.oo: "+inf", -sympy.oo: "-inf within a formula"}.get(infinity, "undefined")


def _split(expr: Any) -> tuple[Any, Any]:
    if expr == -sympy.oo:
        return sympy.Integer(0), sympy.false
    if not expr.has(-sympy.oo):
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
    """The branches that are not hidden, and when one of them is taken."""
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
    # What a hidden branch would have been does not matter: the last one kept stands in for it.
    *branches, (last, _) = kept
    if not branches:
        return last, seen
    return sympy.Piecewise(*branches, (last, True), evaluate=False), seen
