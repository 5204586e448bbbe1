"""Score: a score function with a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

from flashgen.arguments import disagreement, shift
from flashgen.declared import Param
from flashgen.errors import MaskError
from flashgen.symbols import KV_IDX, Q_IDX, SCORE, B, H
from flashgen.tracing.calls import called, check_order, traced_call
from flashgen.tracing.expr import Expr
from flashgen.tracing.kinds import CONDITION
from flashgen.tracing.user_code import mistake

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]

_ARGUMENTS = (SCORE, B, H, Q_IDX, KV_IDX)


@dataclass(frozen=True, eq=False)
class Score:
    """A score function with a name.

    Attributes:
        score_mod: ``(score, b, h, q_idx, kv_idx) -> number``, on symbols, numbers or torch tensors.
        label: how a person writes it, as in ``"softcap(30.0)"``.
        equal_lengths: the function is defined for q_len == kv_len only. The generated ``attention``
            raises ValueError for other lengths.
        align: which key is at a query's own position, by the function's own argument.
        moves: whether an alignment changes it; False if a tensor holds a value for each query.
        along: makes the same function with an alignment; None: q_idx is moved instead.
        parts: the score functions that `then` joined, in order.
        offset: whether its indices count from the offsets of a call: see `flashgen.offsets`.

    Two score functions are equal when their results, parameters and `equal_lengths` are.
    """

    score_mod: ScoreMod
    label: str
    equal_lengths: bool = False
    align: str | None = None
    moves: bool = True
    along: Callable[[str], Score] | None = None
    parts: tuple[Score, ...] = ()
    offset: bool = False

    def then(self, other: Score | ScoreMod) -> Score:
        """The score function that applies this one first and ``other`` to what it returns."""
        after = as_score(other)
        for part in (self, after):
            _check(part)

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            first = self.score_mod(score, b, h, q_idx, kv_idx)
            return after.score_mod(first, b, h, q_idx, kv_idx)

        equal_lengths = self.equal_lengths or after.equal_lengths
        return Score(
            score_mod,
            f"{self.label}.then({after.label})",
            equal_lengths,
            along=lambda align: self.aligned(align).then(after.aligned(align)),
            parts=(self, after),
        )

    def aligned(self, align: str) -> Score:
        """This score function where query 0 stands at the key ``shift(align)``: see `Mask.aligned`.

        Raises:
            MaskError: the function, or a part, has another alignment, or arguments out of order.
        """
        if self.align not in (None, align):
            raise disagreement(called("score", self.label), align)
        if self.along is not None:
            return self.along(align)
        if self.align == align or not self.moves:
            return self
        _check(self)
        offset = shift(align)

        def moved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return self.score_mod(score, b, h, q_idx + offset, kv_idx)

        return replace(self, score_mod=moved, equal_lengths=False, align=align)

    @property
    def unaligned(self) -> tuple[str, ...]:
        """The labels of the parts that are for equal lengths only."""
        if self.parts:
            return tuple(dict.fromkeys(name for part in self.parts for name in part.unaligned))
        return (self.label,) if self.equal_lengths else ()

    def __bool__(self) -> NoReturn:
        raise mistake(
            f"the score {self.label} is neither true nor false",
            "write first.then(second) to apply both, and `is None` to ask whether there is one",
        )

    def _refuse(self, other: object) -> NoReturn:
        """Any operator: raises MaskError."""
        raise mistake(
            f"the score {self.label} is given to an operator, and scores have none",
            "write first.then(second), where second is given what first returns",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse
    )
    __and__ = __rand__ = __or__ = __ror__ = _refuse

    @cached_property
    def traced(self) -> Expr:
        """The number that `score_mod` returns for symbols.

        Raises:
            MaskError: `score_mod` fails on symbols or does not return a number.
        """
        name = called("score", self.label)
        result = traced_call(self.score_mod, _ARGUMENTS, name)
        if not isinstance(result, Expr) or result.kind == CONDITION:
            shown = f"the condition `{result}`" if isinstance(result, Expr) else repr(result)
            raise MaskError(
                f"{name} returned {shown}, not a number; "
                "return a number, as where(condition, score, -inf) for a condition"
            )
        return result

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters and constants it mentions, in the order of first use."""
        return self.traced.params

    @cached_property
    def canonical(self) -> str:
        """One string for every score function that computes the same: stable across processes."""
        declared = [param.declaration for param in self.params]
        return f"{self.traced.sym} params={declared} equal_lengths={self.equal_lengths}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return self.label


def as_score(score: Score | ScoreMod) -> Score:
    """``score`` itself, or a bare function as a `Score` labelled with the function's name."""
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise MaskError(
            f"score={score!r} is no score function; "
            "give a function (score, b, h, q_idx, kv_idx) -> number"
        )
    name = getattr(score, "__name__", type(score).__name__)
    return Score(score, "score" if name == "<lambda>" else name)


def _check(score: Score) -> None:
    """Checks the parts of a score, because tracing sees only the joined function."""
    check_order(score.score_mod, _ARGUMENTS, called("score", score.label))
