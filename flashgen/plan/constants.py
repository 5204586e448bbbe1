"""PrintedConstant: a tensor that the generated module holds, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.constants import Constant
from flashgen.symbolic.printer import torch_source

#: Columns of a line of elements.
WIDTH = 88

_SIZES = {
    "num_q_heads": ("q", "q.shape[1]", "{} heads"),
    "q_len": ("q", "q.shape[2]", "q_len {}"),
    "kv_len": ("k", "k.shape[2]", "kv_len {}"),
}
#: The same of a call with packed sequences, whose largest lengths are arguments.
PACKED_SIZES = {
    "num_q_heads": ("q", "q.shape[1]", "{} heads"),
    "q_len": ("max_q_len", "max_q_len", "{}"),
    "kv_len": ("max_kv_len", "max_kv_len", "{}"),
}


@dataclass(frozen=True)
class PrintedLimit:
    """A size of the call that a constant is for.

    Attributes:
        argument: the argument that has the size, ``"q"``.
        size: the size as an expression, ``"q.shape[2]"``.
        got: the size in a message, an f-string's ``"q_len {q.shape[2]}"``.
        refused: what a refused one is: ``"!="`` or ``">"`` what is accepted.
        accepted: that as an expression.
        shown: that in a message, ``"at most 256"``.
        said: that for a reader, ``"q_len up to 256"``.
    """

    argument: str
    size: str
    got: str
    refused: str
    accepted: str
    shown: str
    said: str


@dataclass(frozen=True)
class PrintedConstant:
    """A constant as the module prints it.

    Attributes:
        name: its variable's.
        dtype: torch's name of it.
        sizes: of its dimensions.
        lines: its elements, ``"x..x"`` for bools and numbers between spaces for others; a line for
            each row, indented where a long one goes on, and an empty one between tables.
        doc: the user's own line about it.
        limits: what ``attention`` checks of the call.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    lines: tuple[str, ...]
    doc: str
    limits: tuple[PrintedLimit, ...]

    @property
    def ndim(self) -> int:
        """The tensor's number of dimensions."""
        return len(self.sizes)

    @property
    def shape(self) -> str:
        """The tensor's sizes, written as a tuple."""
        return f"({', '.join(map(str, self.sizes))}{',' if self.ndim == 1 else ''})"


def printed_constant(
    constant: Constant, sizes: Mapping[str, tuple[str, str, str]] = _SIZES
) -> PrintedConstant:
    """A declared constant as text.

    Args:
        constant: the declared one.
        sizes: of each name of a dimension the argument, the size and its text in a message.
    """
    return PrintedConstant(
        name=constant.name,
        dtype=constant.dtype,
        sizes=constant.elements.shape,
        lines=tuple(_lines(constant)),
        doc=constant.doc,
        limits=tuple(_limit(sizes[of], size.sym, of) for of, size in constant.limits),
    )


def _lines(constant: Constant) -> Iterator[str]:
    rows, is_bool = constant.elements.rows, constant.dtype == "bool"
    table = constant.elements.shape[-2] if len(constant.elements.shape) > 1 else len(rows)
    for i, row in enumerate(rows):
        if i and i % table == 0:
            yield ""
        text = "".join(".x"[x] for x in map(int, row)) if is_bool else " ".join(map(str, row))
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="    ")


def _limit(names: tuple[str, str, str], most: Any, of: str) -> PrintedLimit:
    argument, size, got = names
    accepted = torch_source(most)
    exact = of == "num_q_heads"
    shown = accepted if most.is_Integer else f"{{{accepted}}}"
    return PrintedLimit(
        argument=argument,
        size=size,
        got=got.format(f"{{{size}}}"),
        refused="!=" if exact else ">",
        accepted=accepted,
        shown=shown if exact else f"at most {shown}",
        said=got.format(accepted) if exact else got.format(f"up to {accepted}"),
    )
