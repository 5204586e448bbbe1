"""LargeInteger: an integer of the mask or the score that 32 bits hold for some calls only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.declared import Param
from flashgen.params import Int
from flashgen.symbolic.magnitude import large_integers
from flashgen.symbolic.printer import plain_source, torch_source
from flashgen.symbols import KV_LEN

#: What lengths, heads and the batch are called, in terms of the call's q and k.
SIZES = {
    "batch": "q.shape[0]",
    "num_q_heads": "q.shape[1]",
    "num_kv_heads": "k.shape[1]",
    "q_len": "q.shape[2]",
    "kv_len": "k.shape[2]",
}

#: The same of a call with packed sequences, whose largest lengths are arguments.
PACKED_SIZES = {
    "batch": "num_sequences",
    "num_q_heads": "q.shape[1]",
    "num_kv_heads": "k.shape[1]",
    "q_len": "max_q_len",
    "kv_len": "max_kv_len",
}

#: The arguments that have these sizes; other lengths are arguments themselves.
_OWNERS = {"q.shape[2]": "q", "k.shape[2]": "k"}


@dataclass(frozen=True)
class LargeInteger:
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


def printed_integers(
    exprs: Iterable[Any], params: Iterable[Param], sizes: Mapping[str, str] = SIZES
) -> tuple[LargeInteger, ...]:
    """The large integers of a mask and a score function, each once."""
    numbers = {param.name for param in params if isinstance(param, Int)}
    return tuple(dict.fromkeys(integer for expr in exprs for integer in _of(expr, numbers, sizes)))


def _of(expr: Any, numbers: set[str], sizes: Mapping[str, str]) -> Iterator[LargeInteger]:
    for part, bound in large_integers(expr).items():
        names = sorted(symbol.name for symbol in bound.free_symbols)
        length = sizes["kv_len" if KV_LEN in bound.free_symbols else "q_len"]
        argument = _OWNERS.get(length, length)
        yield LargeInteger(
            shown=plain_source(part),
            bound=torch_source(bound, sizes),
            argument=next((name for name in names if name in numbers), argument),
            got=", ".join(f"{name} {{{sizes.get(name, name)}}}" for name in names),
            names=tuple(names),
        )
