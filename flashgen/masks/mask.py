"""Mask: a predicate on positions, with a name and the operators that join masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

from flashgen.arguments import disagreement, shift
from flashgen.declared import Param
from flashgen.errors import MaskError
from flashgen.symbols import KV_IDX, Q_IDX, B, H
from flashgen.tracing.calls import called, check_order, traced_call
from flashgen.tracing.expr import Expr, as_condition
from flashgen.tracing.kinds import CONDITION
from flashgen.tracing.user_code import mistake

MaskMod = Callable[[Any, Any, Any, Any], Any]

_ARGUMENTS = (B, H, Q_IDX, KV_IDX)


@dataclass(frozen=True, eq=False)
class Mask:
    """A predicate with a name. Masks combine with ``&``, ``|`` and ``~``.

    Attributes:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, on symbols, numbers or torch tensors.
        label: how a person writes it, as in ``"causal(align='bottom_right')"``.
        equal_lengths: the predicate is defined for q_len == kv_len only. The generated
            ``attention`` raises ValueError for other lengths.
        align: which key is at a query's own position, by the mask's own argument: see `causal`.
        moves: whether an alignment changes the mask; False if a table of the mask lists what each
            query sees.
        along: makes the same mask with an alignment; None: q_idx is moved instead.
        parts: the masks that the operators joined.
        offset: whether its indices count from the offsets of a call: see `flashgen.offsets`.

    Two masks are equal when their predicates, parameters and `equal_lengths` are.
    """

    mask_mod: MaskMod
    label: str
    equal_lengths: bool = False
    align: str | None = None
    moves: bool = True
    along: Callable[[str], Mask] | None = None
    parts: tuple[Mask, ...] = ()
    offset: bool = False

    def __and__(self, other: Mask | MaskMod) -> Mask:
        return _combine(self, as_mask(other), "&", lambda a, b: a & b)

    def __rand__(self, other: MaskMod) -> Mask:
        return as_mask(other) & self

    def __or__(self, other: Mask | MaskMod) -> Mask:
        return _combine(self, as_mask(other), "|", lambda a, b: a | b)

    def __ror__(self, other: MaskMod) -> Mask:
        return as_mask(other) | self

    def __invert__(self) -> Mask:
        _check(self)

        def inverted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            seen = self.mask_mod(b, h, q_idx, kv_idx)
            return not seen if isinstance(seen, bool) else ~as_condition(seen)

        return Mask(
            inverted,
            f"~{_parenthesised(self.label)}",
            self.equal_lengths,
            along=lambda align: ~self.aligned(align),
            parts=(self,),
        )

    def __bool__(self) -> NoReturn:
        raise mistake(
            f"the mask {self.label} is neither true nor false",
            "write & for `and`, | for `or`, ~ for `not`, with parentheses around what belongs "
            "together",
        )

    def _refuse(self, other: object) -> NoReturn:
        """Any other operator: raises MaskError."""
        raise mistake(
            f"the mask {self.label} is given to an operator that masks do not have",
            "join masks by & and | and invert them by ~: a & ~b is a without b, "
            "(a & ~b) | (~a & b) one of the two",
        )

    __xor__ = __rxor__ = __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse

    def aligned(self, align: str) -> Mask:
        """This mask where query 0 stands at the key ``shift(align)``.

        flashgen's own masks are made again with the alignment. For any other function q_idx is
        moved: it is then the query's position among the keys.

        Raises:
            MaskError: the mask, or a part, has another alignment, or arguments out of order.
        """
        if self.align not in (None, align):
            raise disagreement(called("mask", self.label), align)
        if self.along is not None:
            return self.along(align)
        if self.align == align or not self.moves:
            return self
        _check(self)
        offset = shift(align)

        def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return self.mask_mod(b, h, q_idx + offset, kv_idx)

        return replace(self, mask_mod=moved, equal_lengths=False, align=align)

    @property
    def can_be_aligned(self) -> bool:
        """Whether an alignment gives each part a meaning for unequal lengths."""
        if self.parts:
            return all(part.can_be_aligned for part in self.parts)
        return self.moves or not self.equal_lengths

    @property
    def unaligned(self) -> tuple[str, ...]:
        """The labels of the parts that are for equal lengths only."""
        if self.parts:
            return tuple(dict.fromkeys(name for part in self.parts for name in part.unaligned))
        return (self.label,) if self.equal_lengths else ()

    @cached_property
    def traced(self) -> Expr:
        """The boolean that `mask_mod` returns for symbols.

        Raises:
            MaskError: `mask_mod` fails on symbols or does not return a boolean.
        """
        name = called("mask", self.label)
        seen = as_condition(traced_call(self.mask_mod, _ARGUMENTS, name))
        if not isinstance(seen, Expr) or seen.kind != CONDITION:
            shown = f"the {seen.kind} `{seen}`" if isinstance(seen, Expr) else repr(seen)
            raise MaskError(
                f"{name} returned {shown}, not a condition; "
                "return a comparison, or several joined by & and |"
            )
        traced: Expr = seen
        return traced

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters and constants it mentions, in the order of first use."""
        return self.traced.params

    @cached_property
    def canonical(self) -> str:
        """One string for every mask that means the same: stable across processes."""
        declared = [param.declaration for param in self.params]
        return f"{self.traced.sym} params={declared} equal_lengths={self.equal_lengths}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return self.label


def as_mask(mask: Mask | MaskMod) -> Mask:
    """``mask`` itself, or a bare function as a `Mask` labelled with the function's name."""
    if isinstance(mask, Mask):
        return mask
    if not callable(mask):
        raise MaskError(f"mask={mask!r} is no mask; give a function (b, h, q_idx, kv_idx) -> bool")
    name = getattr(mask, "__name__", type(mask).__name__)
    return Mask(mask, "mask" if name == "<lambda>" else name)


def _check(mask: Mask) -> None:
    """Checks a part of a mask for mistakes that tracing the whole would not find."""
    check_order(mask.mask_mod, _ARGUMENTS, called("mask", mask.label))


def _combine(a: Mask, b: Mask, symbol: str, join: Callable[[Any, Any], Any]) -> Mask:
    _check(a)
    _check(b)

    def mask_mod(batch: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sides = (part.mask_mod(batch, h, q_idx, kv_idx) for part in (a, b))
        return join(*map(as_condition, sides))

    label = f"{_parenthesised(a.label)} {symbol} {_parenthesised(b.label)}"
    return Mask(
        mask_mod,
        label,
        a.equal_lengths or b.equal_lengths,
        along=lambda align: _combine(a.aligned(align), b.aligned(align), symbol, join),
        parts=(a, b),
    )


def _parenthesised(label: str) -> str:
    """``label`` as an operand: a combination goes into parentheses."""
    return f"({label})" if " & " in label or " | " in label else label
