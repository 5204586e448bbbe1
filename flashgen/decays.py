"""Decay: how fast linear attention forgets, as the spec declares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from flashgen.declared import Param
from flashgen.errors import MaskError, shown
from flashgen.params import Tensor
from flashgen.symbols import H
from flashgen.tracing.calls import traced_call
from flashgen.tracing.expr import Expr
from flashgen.tracing.kinds import CONDITION

#: ``h -> the logarithm of a head's decay``.
HeadDecay = Callable[[Any], Any]

#: The dimensions of a tensor of decays; one for each feature has their number behind these.
OF_TOKENS = ("batch", "num_kv_heads", "kv_len")


@dataclass(frozen=True, eq=False)
class Decay:
    """The logarithm of what a state is multiplied by before a key is added; one of three kinds.

    Attributes:
        label: the user's notation of it.
        tensor: a number for each key, or for each feature of each key, which a call passes; it has
            a gradient.
        numbers: a number for each head of k.
        function: ``h -> number``, the same for any number of heads.
    """

    label: str
    tensor: Tensor | None = None
    numbers: tuple[float, ...] = ()
    function: HeadDecay | None = None

    @cached_property
    def traced(self) -> Any:
        """The number of a head as a sympy expression over `H`; None if there is no function.

        Raises:
            MaskError: the function fails on a symbol, or returns no number of the head alone.
        """
        if self.function is None:
            return None
        result = traced_call(self.function, (H,), f"decay {self.label}")
        if not isinstance(result, Expr) or result.kind == CONDITION:
            raise MaskError(
                f"decay {self.label} returned {shown(result)}, not a number; "
                "return the logarithm of a head's decay"
            )
        if result.params or result.sym.free_symbols - {H}:
            raise MaskError(
                f"decay {self.label} reads more than h; declare a Tensor of dims {OF_TOKENS}"
            )
        if result.sym.is_number and not result.sym <= 0:
            raise MaskError(f"decay {self.label} is {result}, above 0; return a number up to 0")
        return result.sym

    @property
    def features(self) -> int:
        """The features of a key that each have a number; 0 where they share one."""
        names = () if self.tensor is None else self.tensor.names[len(OF_TOKENS) :]
        return int(names[0]) if names else 0

    @property
    def params(self) -> tuple[Param, ...]:
        """The tensor, if it is one.

        Raises:
            MaskError: a function cannot be traced.
        """
        _ = self.traced
        return () if self.tensor is None else (self.tensor,)

    @cached_property
    def canonical(self) -> str:
        """One string for all decays that compute the same, stable across processes."""
        if self.tensor is not None:
            return str(self.tensor.declaration)
        return str(self.numbers or sympy.simplify(self.traced))


def as_decay(value: Any) -> Decay | None:
    """What `linear` takes for ``decay``, as a `Decay`.

    Raises:
        MaskError: it is none of what `linear` takes.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        of_tokens, of_features = value.names[:3], value.names[3:]
        fits = of_tokens == OF_TOKENS and all(x.isdecimal() for x in of_features)
        if not fits or value.dtype != "float32":
            raise MaskError(
                f"linear: decay={value!r}; declare a Tensor of dims {OF_TOKENS} and of float32, or "
                "with the number of features as a fourth one"
            )
        return Decay(value.name, tensor=value)
    if isinstance(value, list | tuple) and value:
        wrong = [x for x in value if not _is_decay(x)]
        if wrong:
            raise MaskError(
                f"linear: decay holds {shown(wrong[0])}; give logarithms, numbers up to 0"
            )
        return Decay(str(tuple(value)), numbers=tuple(map(float, value)))
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return Decay("decay" if name == "<lambda>" else name, function=value)
    raise MaskError(
        f"linear: decay={shown(value)}; give a number for each head of k in a tuple, a function "
        f"h -> number, or a Tensor of dims {OF_TOKENS}"
    )


def _is_decay(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and -math.inf <= value <= 0
    )
