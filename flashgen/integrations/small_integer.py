"""SmallInteger: an element of a captured tensor of 8 or 16 bits, which wraps around as in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from flashgen.declared import Param
from flashgen.tracing.expr import Expr, apply
from flashgen.tracing.kinds import CONDITION, INTEGER
from flashgen.tracing.rows import Elementwise
from flashgen.tracing.torch_names import KNOWN, call
from flashgen.tracing.user_code import name_of

#: Types that compute in their own bits.
SMALL = frozenset((torch.uint8, torch.int8, torch.int16))

#: Operations whose results have the type of their operands, and those of them that stay in its
#: range if these are in it.
_TYPED = frozenset(
    ("+", "-", "*", "**", "//", "%", "<<", ">>", "neg", "abs", "minimum", "maximum", "where",
     "&", "|", "^", "~")
)  # fmt: skip
_IN_RANGE = frozenset(("//", "%", ">>", "minimum", "maximum", "where", "&"))


class SmallInteger(Expr):
    """A whole number of few bits. With positions, and after a cast, it is one of 32 bits.

    Attributes:
        type: ``torch.uint8``, ``torch.int8`` or ``torch.int16``.
    """

    __slots__ = ("type",)

    def __init__(self, sym: Any, params: tuple[Param, ...], type: torch.dtype) -> None:
        super().__init__(sym, params)
        self.type = type

    @property
    def wide(self) -> Expr:
        """The same number, of 32 bits."""
        return Expr(self.sym, self.params)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in KNOWN:
            return super().__getattr__(name)
        return lambda *args, **kwargs: call(name, _apply, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The same for functions of torch; those it does not know are `Expr`'s to refuse."""
        name = name_of(func)
        if name not in KNOWN or any(isinstance(arg, Elementwise) for arg in args):
            return super().__torch_function__(func, types, args, kwargs)
        return call(name, _apply, args, dict(kwargs or {}))

    def __hash__(self) -> int:
        return hash(self.sym)


def _apply(name: str, *operands: Any) -> Any:
    """An operation, on numbers of few bits where torch's result is of few bits."""
    result = apply(name, *operands)
    if not isinstance(result, Expr) or result.kind != INTEGER or name not in _TYPED:
        return result
    if name == "+" and any(type(x) is int and x == 0 for x in operands):
        return result  # how casts to other types are written
    kind = _type(operands[1:] if name == "where" else operands)
    if kind is None:
        return result
    if name not in _IN_RANGE:
        result = _wrapped(result, kind)
    return SmallInteger(result.sym, result.params, kind)


def _type(operands: Iterable[Any]) -> torch.dtype | None:
    """The type of a result, if all operands are of few bits; numbers of Python have no type."""
    found: torch.dtype | None = None
    for x in operands:
        if isinstance(x, SmallInteger):
            found = x.type if found is None else torch.promote_types(found, x.type)
        elif isinstance(x, float) or (isinstance(x, Expr) and x.kind != CONDITION):
            return None
    return found


def _wrapped(x: Expr, kind: torch.dtype) -> Expr:
    """A number modulo those that a type has."""
    limits = torch.iinfo(kind)
    low = apply("&", x if limits.min == 0 else apply("-", x, limits.min), limits.max - limits.min)
    return low if limits.min == 0 else apply("+", low, limits.min)


def _operator(name: str, *, reflected: bool = False) -> Any:
    if reflected:
        return lambda self, other: _apply(name, other, self)
    return lambda self, *others: _apply(name, self, *others)


for _name, _operation in (
    ("add", "+"), ("sub", "-"), ("mul", "*"), ("pow", "**"), ("floordiv", "//"), ("mod", "%"),
    ("lshift", "<<"), ("rshift", ">>"), ("and", "&"), ("or", "|"), ("xor", "^"),
):  # fmt: skip
    setattr(SmallInteger, f"__{_name}__", _operator(_operation))
    setattr(SmallInteger, f"__r{_name}__", _operator(_operation, reflected=True))
for _name, _operation in (("neg", "neg"), ("abs", "abs"), ("invert", "~")):
    setattr(SmallInteger, f"__{_name}__", _operator(_operation))
