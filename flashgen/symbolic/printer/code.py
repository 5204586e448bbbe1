"""Code: an expression of a kernel, which becomes text when a template prints it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from flashgen.symbolic.printer.core import Printer
from flashgen.symbolic.printer.dialects import Dialect
from flashgen.symbols import Load


@dataclass(frozen=True)
class Code:
    """An expression of a kernel.

    Attributes:
        expr: a number or a condition, over symbols and variables that other lines assign.
        printer: prints it as Triton source.
    """

    expr: Any
    printer: Printer = field(compare=False, repr=False)

    def __str__(self) -> str:
        raise TypeError(f"code has a text in a dialect only: {self!r}")

    def text(self, dialect: Dialect | None = None) -> str:
        """The source of the expression, in Triton or in another dialect of kernels."""
        return self._printed(dialect)[0]

    def names_in(self, dialect: Dialect) -> frozenset[str]:
        """The variables that the source reads."""
        return self._printed(dialect)[1]

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the Triton source reads."""
        return self._printed(None)[1]

    def _printed(self, dialect: Dialect | None) -> tuple[str, frozenset[str]]:
        printer = replace(self.printer, dialect=dialect or self.printer.dialect, read=set())
        return str(printer.text(self.expr)), frozenset(printer.read)


def read_by(codes: Iterable[Code | None], dialect: Dialect | None = None) -> frozenset[str]:
    """The variables that any of the codes reads, in Triton or in another dialect."""
    found = (code for code in codes if code is not None)
    return frozenset().union(*(code.names_in(dialect) if dialect else code.names for code in found))


def gathered_by(codes: Iterable[Code | None]) -> tuple[int, ...]:
    """The numbers of dimensions of the tensors that the codes index, ascending."""
    loads = (load for code in codes if code is not None for load in code.expr.atoms(Load))
    return tuple(sorted({len(load.args) - 1 for load in loads}))
