"""LargeWhole: what a call must not let a whole number of the mask or the score grow to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flashgen.declared import Param
from flashgen.params import Int
from flashgen.plan.sizes import SIZES
from flashgen.symbolic.magnitude import large_wholes
from flashgen.symbolic.printer import plain_source, torch_source
from flashgen.symbols import KV_LEN


@dataclass(frozen=True)
class LargeWhole:
    """A part of a mask or a score that 32 bits hold for some calls only, as text.

    Attributes:
        shown: the part, ``"kv_idx * stride"``.
        bound: what its magnitude stays within, of a call's q, k and numbers.
        argument: the argument that an error names.
        got: what the bound is made of in a message, an f-string's ``"kv_len {k.shape[2]}"``.
        names: what the bound reads.
    """

    shown: str
    bound: str
    argument: str
    got: str
    names: tuple[str, ...]


def printed_wholes(exprs: Iterable[Any], params: Iterable[Param]) -> tuple[LargeWhole, ...]:
    """The large integers of a mask and a score function, each once."""
    numbers = {param.name for param in params if isinstance(param, Int)}
    return tuple(dict.fromkeys(whole for expr in exprs for whole in _of(expr, numbers)))


def _of(expr: Any, numbers: set[str]) -> Iterator[LargeWhole]:
    for part, bound in large_wholes(expr).items():
        names = sorted(symbol.name for symbol in bound.free_symbols)
        argument = "k" if KV_LEN in bound.free_symbols else "q"
        yield LargeWhole(
            shown=plain_source(part),
            bound=torch_source(bound, SIZES),
            argument=next((name for name in names if name in numbers), argument),
            got=", ".join(f"{name} {{{SIZES.get(name, name)}}}" for name in names),
            names=tuple(names),
        )
